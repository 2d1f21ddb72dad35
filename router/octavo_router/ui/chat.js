// A small chat over the API that every client uses, with its history in this page only.

import { byId, count, element, milliseconds } from "./dom.js";
import { eventsOf } from "./events.js";
import { authorization } from "./key.js";

const URL = "v1/chat/completions";

export class Chat {
  /** `onRequest(requestId)`: a request of this chat was accepted. */
  constructor(onRequest) {
    this._onRequest = onRequest;
    this._messages = [];
    this._abort = null;
    this._log = byId("chat-log");
    this._input = byId("chat-input");
    this._model = byId("chat-model");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    this._input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this._send();
    });
    byId("chat-stop").addEventListener("click", () => this._abort?.abort());
    byId("chat-clear").addEventListener("click", () => this._clear());
  }

  /** The names that the router serves. */
  setModels(names) {
    const known = [...this._model.options].map((option) => option.value);
    if (known.join("\n") === names.join("\n")) return;
    this._model.replaceChildren(...names.map((name) => element("option", { value: name, text: name })));
    this._model.hidden = names.length < 2;
  }

  _clear() {
    this._abort?.abort();
    this._messages = [];
    this._log.replaceChildren(byId("chat-empty") ?? this._empty);
  }

  async _send() {
    const text = this._input.value.trim();
    if (!text || this._abort) return;
    this._empty ??= byId("chat-empty");
    this._empty.remove();
    this._input.value = "";
    this._messages.push({ role: "user", content: text });
    this._say("user", text);
    const bubble = this._say("assistant", "");
    const note = element("p", { class: "muted note" });
    this._abort = new AbortController();
    this._setBusy(true);
    const answer = new Answer();
    try {
      await this._stream(answer, bubble);
    } catch (error) {
      if (error.name !== "AbortError") answer.problem = error.message;
      else answer.isStopped = true;
    }
    this._abort = null;
    this._setBusy(false);
    if (answer.text) this._messages.push({ role: "assistant", content: answer.text });
    else {
      // An unanswered question would be asked again with the next one.
      this._messages.pop();
      bubble.remove();
    }
    note.textContent = answer.summary();
    note.classList.toggle("problem", answer.problem !== "");
    this._log.append(note);
    this._scroll(true);
    this._input.focus();
  }

  async _stream(answer, bubble) {
    const response = await fetch(URL, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({
        ...(this._model.value ? { model: this._model.value } : {}),
        messages: this._messages,
        stream: true,
        stream_options: { include_usage: true },
      }),
      signal: this._abort.signal,
    });
    if (!response.ok) {
      const body = await response.json().catch(() => null);
      throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
    }
    this._onRequest(response.headers.get("x-request-id"));
    for await (const { data } of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const isAtEnd = this._isAtEnd();
      answer.take(chunk);
      if (bubble.textContent !== answer.text) bubble.textContent = answer.text;
      if (isAtEnd) this._scroll(false);
    }
    throw new Error("the answer broke off");
  }

  _say(role, text) {
    const bubble = element("p", { class: `bubble ${role}`, text });
    const name = element("span", { class: "hidden", text: role === "user" ? "You:" : "Model:" });
    this._log.append(name, bubble);
    this._scroll(true);
    return bubble;
  }

  _setBusy(isBusy) {
    byId("chat-send").hidden = isBusy;
    byId("chat-stop").hidden = !isBusy;
  }

  _isAtEnd() {
    return this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 40;
  }

  _scroll(isForced) {
    if (isForced || this._isAtEnd) this._log.scrollTop = this._log.scrollHeight;
  }
}

/** One answer as it comes, and its numbers. */
class Answer {
  constructor() {
    this.text = "";
    this.problem = "";
    this.isStopped = false;
    this._startedAt = performance.now();
    this._firstAt = 0;
    this._lastAt = 0;
    this._finish = "";
    this._usage = null;
  }

  take(chunk) {
    if (chunk.usage) this._usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this._finish = choice.finish_reason ?? this._finish;
    if (!choice.delta?.content) return;
    this.text += choice.delta.content;
    this._lastAt = performance.now();
    this._firstAt ||= this._lastAt;
  }

  summary() {
    const parts = [];
    if (this._usage) {
      const tokens = this._usage.completion_tokens;
      parts.push(`${count(tokens)} tokens`);
      const seconds = (this._lastAt - this._firstAt) / 1000;
      if (tokens > 1 && seconds > 0) parts.push(`${count((tokens - 1) / seconds)} tokens/s`);
    }
    if (this._firstAt) parts.push(`first after ${milliseconds(this._firstAt - this._startedAt)}`);
    if (this._usage) {
      const cached = this._usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`prompt ${count(this._usage.prompt_tokens)} (${count(cached)} cached)`);
    }
    if (this._finish === "length") parts.push("cut at the limit of tokens");
    if (this.isStopped) parts.push("stopped");
    if (this.problem) parts.push(this.problem);
    return parts.join(" · ");
  }
}
