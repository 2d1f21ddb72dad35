// The status page. Read first: the feed's events go into `cells`, and the views are drawn from it.
//
//     feed.js -> onEvent -> cells (Map) -> cells.js, requests.js    at each event
//                                       -> charts.js                once a second

import { Cells } from "./cells.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, setClass, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { KeyForm, keyStore } from "./key.js";
import { Requests } from "./requests.js";

const SAMPLE_MS = 1000;
// A cell that isn't connected any more is shown for so long.
const LOST_SHOWN_MS = 120_000;
// The hit rate is that of prompts looked up within this many samples.
const HIT_WINDOW = 30;
const STATES = {
  connecting: ["connecting", "warn"],
  live: ["live", "good"],
  waiting: ["reconnecting", "bad"],
  locked: ["key needed", "warn"],
};

/** By address: {schedulerId, address, picture, lostAt}. */
const cells = new Map();
const lookups = [];
let state = "connecting";

const cellsView = new Cells(byId("cells"));
const requestsView = new Requests(byId("requests"), byId("no-requests"));
const charts = new Charts(byId("charts"));
const chat = new Chat((requestId) => requestsView.markMine(requestId));
const feed = new Feed(onEvent, onState);
const keyForm = new KeyForm(() => feed.start());

byId("forget-key").addEventListener("click", () => {
  keyStore.forget();
  cells.clear();
  feed.start();
});

function onEvent(name, data) {
  if (name === "router") {
    chat.setModels(data.models);
    setText(byId("about"), `${data.models.join(", ")} · ${data.router_id} · ${data.version}`);
    // A new stream tells all cells that there are.
    for (const cell of cells.values()) cell.lostAt ??= Date.now();
  } else if (name === "cell") {
    const { scheduler_id: schedulerId, address, picture } = data;
    cells.set(address, { schedulerId, address, picture, lostAt: null });
  } else if (name === "lost") {
    const cell = cells.get(data.address);
    if (cell) cell.lostAt = Date.now();
  }
  draw();
}

function onState(now) {
  if (now === state && now !== "locked") return;
  state = now;
  const [text, style] = STATES[now];
  setText(byId("state"), text);
  setClass(byId("state"), `pill ${style}`);
  const isLocked = now === "locked";
  if (isLocked) keyForm.ask(keyStore.get() ? "That key is not known here." : "");
  else if (now === "live") keyForm.hide();
  if (isLocked) keyStore.forget();
  if (now === "live" || isLocked) byId("board").hidden = isLocked;
  setClass(byId("board"), now === "live" ? "" : "stale");
  byId("forget-key").hidden = !keyStore.get();
}

function draw() {
  for (const [address, cell] of cells) {
    if (cell.lostAt !== null && Date.now() - cell.lostAt > LOST_SHOWN_MS) cells.delete(address);
  }
  const all = [...cells.values()].sort((a, b) => a.schedulerId.localeCompare(b.schedulerId));
  cellsView.update(all);
  requestsView.update(all);
  byId("no-cells").hidden = all.length > 0;
}

/** What the charts show now, over all connected cells; null if nothing is known. */
function sample() {
  const live = [...cells.values()].filter((cell) => cell.lostAt === null);
  if (state !== "live" || !live.length) return null;
  const pictures = live.map((cell) => cell.picture);
  const workers = pictures.flatMap((picture) => picture.workers);
  const sum = (items, name) => items.reduce((total, item) => total + (item[name] ?? 0), 0);
  const numBlocks = sum(workers, "num_blocks");
  return {
    decode: sum(workers, "decode_tokens_per_s"),
    prefill: sum(workers, "prefill_tokens_per_s"),
    running: sum(pictures, "num_running"),
    waiting: sum(pictures, "num_waiting"),
    used: numBlocks ? sum(workers, "num_used_blocks") / numBlocks : null,
    cached: numBlocks ? sum(workers, "num_cached_blocks") / numBlocks : null,
    hits: hitRate(sum(pictures, "prefix_queries"), sum(pictures, "prefix_hits")),
  };
}

function hitRate(queries, hits) {
  // Totals fall when a cell leaves: then what came before says nothing.
  if (lookups.length && lookups[lookups.length - 1].queries > queries) lookups.length = 0;
  lookups.push({ queries, hits });
  if (lookups.length > HIT_WINDOW) lookups.shift();
  const asked = queries - lookups[0].queries;
  return asked > 0 ? (hits - lookups[0].hits) / asked : null;
}

setInterval(() => charts.add(sample()), SAMPLE_MS);
feed.start();
