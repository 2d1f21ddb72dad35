// The live feed: one request that streams events; when it breaks off, another one.

import { eventsOf } from "./events.js";
import { authorization } from "./key.js";

const URL = "ui/feed";
const BACKOFF_MS = [500, 1000, 2000, 5000];
// The router sends a comment when nothing else is to be said for 15 s.
const SILENCE_MS = 25_000;

export class Feed {
  /**
   * `onEvent(name, data)`: parsed events. `onState(state)`: "connecting", "live", "waiting"
   * (it will try again), "locked" (the server wants another key; call `start` again).
   */
  constructor(onEvent, onState) {
    this._onEvent = onEvent;
    this._onState = onState;
    this._run = 0;
    this._abort = new AbortController();
  }

  start() {
    this.stop();
    this._follow(this._run);
  }

  stop() {
    this._run += 1;
    this._abort.abort();
  }

  async _follow(run) {
    let failures = 0;
    this._onState("connecting");
    while (run === this._run) {
      try {
        const isOpen = await this._read(run, () => (failures = 0));
        if (!isOpen) return;
      } catch {
        // Aborted, refused or broken off: all the same to who looks.
      }
      if (run !== this._run) return;
      this._onState("waiting");
      const wait = BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  /** Reads until the stream ends; false if a key is wanted. */
  async _read(run, onLive) {
    this._abort = new AbortController();
    let timer = setTimeout(() => this._abort.abort(), SILENCE_MS);
    try {
      const answer = await fetch(URL, {
        headers: authorization(),
        signal: this._abort.signal,
        cache: "no-store",
      });
      if (answer.status === 401) {
        if (run === this._run) this._onState("locked");
        return false;
      }
      if (!answer.ok) return true;
      const onBytes = () => {
        clearTimeout(timer);
        timer = setTimeout(() => this._abort.abort(), SILENCE_MS);
      };
      for await (const { event, data } of eventsOf(answer.body, onBytes)) {
        if (run !== this._run) return true;
        onLive();
        this._onState("live");
        this._onEvent(event, JSON.parse(data));
      }
      return true;
    } finally {
      clearTimeout(timer);
    }
  }
}
