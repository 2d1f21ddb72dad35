// The last requests: where each one went, and why. Never what it said.

import { age, count, element, milliseconds, setClass, setText } from "./dom.js";

const MAX_ROWS = 50;
const COLUMNS = [
  ["Request", "mono id"], ["State", "state"], ["Worker", ""], ["Why there", ""],
  ["Prompt", "number"], ["Cached", "number"], ["Generated", "number"], ["Queued", "number"],
  ["First token", "number"], ["Age", "number"], ["Moved", "number"], ["Preempted", "number"],
];
// What is rare: left out where there is little room.
const NONE = "–";
const STYLES = {
  stop: "good", length: "good", cancelled: "warn", moved: "warn", deadline: "bad", error: "bad",
};

export class Requests {
  constructor(body, empty) {
    this._body = body;
    this._empty = empty;
    this._rows = new Map();
    this._mine = new Set();
  }

  /** A request of this page's own chat. */
  markMine(requestId) {
    this._mine.add(requestId);
  }

  /** `cells`: of the store. */
  update(cells) {
    // Workers of several cells may have equal names.
    const place = (cell) => (cells.length > 1 ? ` @ ${cell.schedulerId}` : "");
    const items = cells.flatMap((cell) =>
      cell.picture.requests.map((r) => [
        `${cell.address} ${r.serial} ${r.index}`,
        r.worker_id ? { ...r, worker_id: r.worker_id + place(cell) } : r,
      ]),
    );
    items.sort(([, a], [, b]) => a.age_s - b.age_s);
    items.length = Math.min(items.length, MAX_ROWS);
    const keys = new Set(items.map(([key]) => key));
    for (const [key, row] of this._rows) {
      if (keys.has(key)) continue;
      row.root.remove();
      this._rows.delete(key);
    }
    items.forEach(([key, request], i) => {
      let row = this._rows.get(key);
      if (!row) this._rows.set(key, (row = new Row()));
      if (this._body.children[i] !== row.root) {
        this._body.insertBefore(row.root, this._body.children[i] ?? null);
      }
      row.update(request, this._mine.has(request.request_id));
    });
    this._empty.hidden = items.length > 0;
  }
}

class Row {
  constructor() {
    this._badge = element("span", { class: "pill" });
    this._cells = COLUMNS.map(([name, style]) =>
      element("td", { class: style, "data-name": name }),
    );
    this._cells[1].append(this._badge);
    this.root = element("tr", {}, ...this._cells);
  }

  update(request, isMine) {
    const state = request.outcome ?? request.phase;
    setText(this._badge, state);
    setClass(this._badge, `pill ${STYLES[state] ?? "busy"}`);
    setClass(this.root, isMine ? "mine" : "");
    const id = request.index ? `${request.request_id} #${request.index}` : request.request_id;
    const texts = [
      id,
      null,
      request.worker_id || (request.outcome ? "none" : "…"),
      request.why ?? (request.outcome ? "ended in the queue" : "waits again"),
      count(request.num_prompt_tokens),
      count(request.num_cached_tokens),
      count(request.num_generated_tokens),
      milliseconds(request.queue_ms),
      milliseconds(request.ttft_ms),
      age(request.age_s),
      request.num_moves ? count(request.num_moves) : NONE,
      request.num_preemptions ? count(request.num_preemptions) : NONE,
    ];
    texts.forEach((text, i) => {
      if (text === null) return;
      setText(this._cells[i], text);
      this._cells[i].classList.toggle("none", text === NONE);
    });
    if (this._cells[0].title !== id) this._cells[0].title = id;
  }
}
