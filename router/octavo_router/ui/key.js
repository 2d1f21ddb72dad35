// The API key: asked for when the server wants one, kept for this tab, sent as a header.

import { byId } from "./dom.js";

const NAME = "octavo-api-key";

export const keyStore = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (key) => sessionStorage.setItem(NAME, key),
  forget: () => sessionStorage.removeItem(NAME),
};

/** Headers that authenticate a request. */
export function authorization() {
  const key = keyStore.get();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The form that asks for a key; `onKey` is called when one was given. */
export class KeyForm {
  constructor(onKey) {
    this._section = byId("locked");
    this._input = byId("key");
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this._input.value.trim();
      if (!key) return;
      keyStore.set(key);
      this._input.value = "";
      byId("key-problem").textContent = "";
      onKey();
    });
  }

  ask(problem) {
    byId("key-problem").textContent = problem;
    if (!this._section.hidden) return;
    this._section.hidden = false;
    this._input.focus();
  }

  hide() {
    this._section.hidden = true;
  }
}
