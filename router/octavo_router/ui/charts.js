// Four charts over the last minutes, drawn as SVG paths. A sample is taken once a second.

import { count, element, percent, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const NUM_SAMPLES = 180;
const WIDTH = 180;
const HEIGHT = 60;

/** Lines of a chart: [key of the sample, name, CSS class]. `stacked`: each on top of the last. */
const CHARTS = [
  {
    title: "Tokens/s",
    lines: [["decode", "generated", "blue"], ["prefill", "prompt", "amber"]],
    show: count,
    least: 10,
  },
  {
    title: "Requests",
    lines: [["running", "running", "blue"], ["waiting", "waiting", "amber"]],
    show: count,
    least: 4,
  },
  {
    title: "KV cache",
    lines: [["used", "in use", "blue"], ["cached", "cached", "pale"]],
    show: percent,
    most: 1,
    stacked: true,
  },
  { title: "Prefix hits", lines: [["hits", "of prompts", "blue"]], show: percent, most: 1 },
];

export class Charts {
  constructor(root) {
    this._samples = [];
    this._charts = CHARTS.map((definition) => new Chart(definition));
    root.append(...this._charts.map((chart) => chart.root));
  }

  /** `sample`: numbers by key, null where there is none; or null for a gap. */
  add(sample) {
    this._samples.push(sample);
    if (this._samples.length > NUM_SAMPLES) this._samples.shift();
    for (const chart of this._charts) chart.draw(this._samples);
  }
}

class Chart {
  constructor({ title, lines, show, least = 0, most = null, stacked = false }) {
    this._lines = lines;
    this._show = show;
    this._least = least;
    this._most = most;
    this._isStacked = stacked;
    this._values = lines.map(([, name, style]) => {
      const value = element("strong", { text: "–" });
      const item = element("span", { class: `value ${style}` }, value, ` ${name}`);
      return { value, item };
    });
    const svg = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    for (const y of [0, HEIGHT / 2, HEIGHT]) {
      svg.append(shape("path", { class: "grid", d: `M0 ${y}H${WIDTH}` }));
    }
    this._areas = lines.map(([, , style]) => shape("path", { class: `area ${style}` }));
    this._paths = lines.map(([, , style]) => shape("path", { class: `line ${style}` }));
    // Those behind first.
    svg.append(...[...this._areas].reverse(), ...[...this._paths].reverse());
    this._top = element("span", { class: "scale", "aria-hidden": "true" });
    this.root = element(
      "figure",
      { class: "card chart" },
      element("figcaption", { text: title }),
      element("div", { class: "values" }, ...this._values.map(({ item }) => item)),
      element("div", { class: "plot" }, svg, this._top),
    );
  }

  draw(samples) {
    const series = this._lines.map(([key]) => samples.map((sample) => sample?.[key] ?? null));
    series.forEach((values, i) => {
      setText(this._values[i].value, this._show(values[values.length - 1]));
    });
    if (this._isStacked) {
      for (let i = 1; i < series.length; i += 1) {
        series[i] = series[i].map((v, at) => (v === null ? null : v + series[i - 1][at]));
      }
    }
    const most = this._most ?? roundUp(Math.max(this._least, ...series.flat()));
    setText(this._top, this._show(most));
    const start = WIDTH - (samples.length - 1) * (WIDTH / (NUM_SAMPLES - 1));
    series.forEach((values, i) => {
      const runs = runsOf(values, start, most);
      this._paths[i].setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
      const areas = runs.map((run) => {
        const [first, last] = [run[0].split(" ")[0], run[run.length - 1].split(" ")[0]];
        return `M${first} ${HEIGHT}L${run.join("L")}L${last} ${HEIGHT}Z`;
      });
      this._areas[i].setAttribute("d", areas.join(""));
    });
  }
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Points "x y" of each run of values without a gap. */
function runsOf(values, start, most) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null) {
      run = null;
      return;
    }
    if (run === null) runs.push((run = []));
    const x = start + (i * WIDTH) / (NUM_SAMPLES - 1);
    const y = HEIGHT - (HEIGHT - 2) * Math.min(value / most, 1);
    run.push(`${x.toFixed(1)} ${y.toFixed(1)}`);
  });
  return runs;
}

/** The next of 1, 2, 5, 10, 20, 50, ... */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= value);
  return step * power;
}
