// The cells as a picture: each scheduler with its queue, its workers with their block maps.

import { BlockMap } from "./block_map.js";
import { age, count, element, milliseconds, percent, setClass, setText } from "./dom.js";

const LEGEND = [
  ["used", "used"],
  ["shared", "shared"],
  ["cached", "cached"],
  ["free", "free"],
];

/** Keeps one node per key, in the order of the items. */
class Keyed {
  constructor(root, make) {
    this._root = root;
    this._make = make;
    this._views = new Map();
  }

  update(items) {
    const keys = new Set(items.map(([key]) => key));
    for (const [key, view] of this._views) {
      if (keys.has(key)) continue;
      view.root.remove();
      this._views.delete(key);
    }
    items.forEach(([key, item], i) => {
      let view = this._views.get(key);
      if (!view) this._views.set(key, (view = this._make()));
      if (this._root.children[i] !== view.root) {
        this._root.insertBefore(view.root, this._root.children[i] ?? null);
      }
      view.update(item);
    });
  }
}

export class Cells {
  constructor(root) {
    this._cells = new Keyed(root, () => new CellView());
  }

  /** `cells`: of the store, connected ones and those lost lately. */
  update(cells) {
    this._cells.update(cells.map((cell) => [cell.address, cell]));
  }
}

class CellView {
  constructor() {
    this._name = element("h3");
    this._address = element("span", { class: "muted mono" });
    this._badge = element("span", { class: "pill" });
    this._facts = new Facts([
      "waiting", "queued tokens", "oldest wait", "preemptions", "moves", "outcomes",
    ]);
    const workers = element("div", { class: "workers" });
    this._workers = new Keyed(workers, () => new WorkerView());
    const head = element("div", { class: "row" }, this._name, this._address, this._badge);
    this.root = element("article", { class: "card cell" }, head, this._facts.root, workers);
  }

  update(cell) {
    const { picture } = cell;
    setText(this._name, cell.schedulerId);
    setText(this._address, cell.address);
    const state = cell.lostAt !== null ? "not connected" : picture.draining ? "draining" : "serving";
    setText(this._badge, state);
    setClass(this._badge, `pill ${{ "not connected": "bad", draining: "warn" }[state] ?? "good"}`);
    setClass(this.root, `card cell${cell.lostAt !== null ? " gone" : ""}`);
    const outcomes = Object.entries(picture.outcomes).map(([name, n]) => `${count(n)} ${name}`);
    this._facts.update([
      count(picture.num_waiting),
      count(picture.queue_tokens),
      picture.num_waiting ? age(picture.oldest_wait_s) : "–",
      count(picture.num_preemptions),
      count(picture.num_moves),
      outcomes.join(", ") || "–",
    ]);
    const workers = picture.workers.map((worker) => [worker.worker_id || worker.address, worker]);
    this._workers.update(workers.sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })));
  }
}

class WorkerView {
  constructor() {
    this._name = element("h4");
    this._badge = element("span", { class: "pill" });
    this._address = element("span", { class: "muted mono" });
    this._note = element("p", { class: "muted note" });
    const canvas = element("canvas", { role: "img" });
    this._canvas = canvas;
    const map = element("div", { class: "map" }, canvas);
    this._map = new BlockMap(canvas);
    this._legend = LEGEND.map(([, name]) => element("span", { text: name }));
    const legend = element("p", { class: "legend" });
    LEGEND.forEach(([state], i) => {
      const swatch = element("i", { class: `swatch ${state}`, "aria-hidden": "true" });
      legend.append(element("span", {}, swatch, this._legend[i]));
    });
    this._rows = new Meter("rows");
    this._facts = new Facts([
      "generated/s", "prompt/s", "decode step", "steps/s", "step", "plans ahead", "epoch",
      "slots filled",
    ]);
    this._live = element("div", {}, map, legend, this._rows.root, this._facts.root);
    const head = element("div", { class: "row" }, this._name, this._badge);
    this.root = element("section", {}, head, this._address, this._note, this._live);
  }

  update(worker) {
    const isThere = worker.phase === "running" || worker.phase === "leaving";
    setText(this._name, worker.worker_id || "unknown worker");
    setText(this._badge, worker.phase);
    const style = { running: "good", leaving: "warn", awaited: "warn", gone: "bad", taken: "warn" };
    setClass(this._badge, `pill ${style[worker.phase] ?? ""}`);
    setText(this._address, worker.address);
    setClass(this.root, `worker ${worker.phase}`);
    this.root.setAttribute("aria-label", `${worker.worker_id || worker.address}: ${worker.phase}`);
    setText(this._note, noteOf(worker));
    this._note.hidden = isThere;
    this._live.hidden = !isThere;
    if (isThere) this._showLive(worker);
  }

  _showLive(worker) {
    const numUsed = worker.num_used_blocks - worker.num_shared_blocks;
    const counts = {
      used: numUsed,
      shared: worker.num_shared_blocks,
      cached: worker.num_cached_blocks,
      free: worker.num_free_blocks,
    };
    LEGEND.forEach(([state, name], i) => setText(this._legend[i], `${name} ${count(counts[state])}`));
    const words = LEGEND.map(([state, name]) => `${counts[state]} ${name}`).join(", ");
    this._canvas.setAttribute("aria-label", `${worker.num_blocks} KV blocks: ${words}`);
    this._map.show(worker.block_map);
    this._rows.update(worker.num_rows, worker.max_num_seqs);
    this._facts.update([
      count(worker.decode_tokens_per_s),
      count(worker.prefill_tokens_per_s),
      worker.decode_step_ms ? milliseconds(worker.decode_step_ms) : "–",
      count(worker.steps_per_s),
      count(worker.step),
      count(worker.plans_in_flight),
      count(worker.epoch),
      worker.num_used_blocks ? percent(worker.kv_utilization) : "–",
    ]);
  }
}

/** Named values. */
class Facts {
  constructor(names) {
    this._values = names.map(() => element("dd", { text: "–" }));
    const pairs = names.map((name, i) =>
      element("div", {}, element("dt", { text: name }), this._values[i]),
    );
    this.root = element("dl", { class: "facts" }, ...pairs);
  }

  update(values) {
    values.forEach((value, i) => setText(this._values[i], value));
  }
}

/** A bar of a part in a whole. */
class Meter {
  constructor(name) {
    this._name = name;
    this._text = element("span");
    this._bar = element("i");
    this.root = element(
      "div",
      { class: "meter" },
      this._text,
      element("div", { class: "bar", "aria-hidden": "true" }, this._bar),
    );
  }

  update(part, whole) {
    setText(this._text, `${count(part)} of ${count(whole)} ${this._name}`);
    this._bar.style.width = `${(100 * part) / Math.max(whole, 1)}%`;
  }
}

function noteOf(worker) {
  if (worker.phase === "awaited") return "The scheduler dials it; it hasn't answered yet.";
  if (worker.phase === "taken") return "Another scheduler leads it now.";
  if (worker.phase !== "gone") return "";
  const how = { crash: "its stream broke", hang: "its steps stopped", left: "it left" };
  const why = how[worker.loss] ?? "it isn't led now";
  const when = worker.gone_s === null ? "" : ` ${age(worker.gone_s)} ago`;
  return `Gone${when}: ${why}. What ran there goes on elsewhere.`;
}
