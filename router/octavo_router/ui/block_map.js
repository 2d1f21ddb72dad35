// A worker's block map on a canvas: a square per cell, filled with the mix of its blocks.

const GAP = 1;
const [MIN_SIZE, MAX_SIZE] = [5, 14];
const MAX_HEIGHT = 132;
const FULL = 15;
// From the bottom of a square upwards; what is left is free.
const STATES = ["used", "shared", "cached"];

export class BlockMap {
  constructor(canvas) {
    this._canvas = canvas;
    this._map = null;
    new ResizeObserver(() => this._draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._draw());
  }

  /** `map`: state -> a hexadecimal digit per cell; null: no map. */
  show(map) {
    this._map = map;
    this._draw();
  }

  _draw() {
    const width = this._canvas.parentElement.clientWidth;
    if (!width) return;
    const numCells = this._map?.used.length ?? 0;
    const { size, columns } = grid(numCells, width);
    const height = numCells ? Math.ceil(numCells / columns) * size - GAP : 0;
    const ratio = devicePixelRatio || 1;
    this._canvas.width = Math.round(width * ratio);
    this._canvas.height = Math.round(height * ratio);
    this._canvas.style.height = `${height}px`;
    if (!numCells) return;
    const context = this._canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(this._canvas);
    const colours = Object.fromEntries(
      ["free", ...STATES].map((state) => [state, style.getPropertyValue(`--${state}`).trim()]),
    );
    for (let i = 0; i < numCells; i += 1) {
      const x = (i % columns) * size;
      const y = Math.floor(i / columns) * size;
      drawCell(context, x, y, size - GAP, this._map, i, colours);
    }
  }
}

function drawCell(context, x, y, side, map, i, colours) {
  context.fillStyle = colours.free;
  context.fillRect(x, y, side, side);
  let bottom = y + side;
  for (const state of STATES) {
    const share = parseInt(map[state][i], 16) / FULL;
    if (!share) continue;
    const height = Math.min(Math.max(share * side, 1), bottom - y);
    context.fillStyle = colours[state];
    context.fillRect(x, bottom - height, side, height);
    bottom -= height;
  }
}

/** Squares as large as fit. */
function grid(numCells, width) {
  const fitting = Math.floor(Math.sqrt((width * MAX_HEIGHT) / Math.max(numCells, 1)));
  const size = Math.min(Math.max(fitting, MIN_SIZE), MAX_SIZE);
  return { size, columns: Math.floor((width + GAP) / size) };
}
