// The turns of a conversation as elements. What they do when clicked is given by `actions`.

import { copyButton, el } from "./dom.js";
import { MarkdownView, codeBlock } from "./markdown.js";

const button = (label, onclick, kind = "quiet") =>
  el("button", { type: "button", class: kind, onclick }, label);

export function userTurn(message, actions) {
  const text = el("div", { class: "text" }, message.content);
  const tools = el(
    "footer",
    {},
    button("Edit", edit),
    copyButton(() => message.content),
  );
  const turn = el("article", { class: "turn user", "aria-label": "You" }, text, tools);

  function edit() {
    const area = el("textarea", { "aria-label": "Edit your message", rows: 3 });
    area.value = message.content;
    const send = () => area.value.trim() && actions.edit(message, area.value);
    const close = () => {
      turn.replaceChildren(text, tools);
      tools.firstChild.focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    const hint = el("span", { class: "hint" }, "What follows is asked anew.");
    turn.replaceChildren(
      area,
      el("footer", {}, button("Send", send, "primary"), button("Cancel", close), hint),
    );
    area.focus();
  }
  return turn;
}

export function toolTurn(message, name) {
  const title = `Result of ${name || message.tool_call_id}`;
  return el("article", { class: "turn tool", "aria-label": title }, titled(title, message.content));
}

const titled = (title, text) =>
  el("div", { class: "titled" }, el("h3", {}, title), el("pre", { tabindex: 0 }, text));

/** An assistant's turn. `update` shows what the message has become; `finish` when nothing more will come. */
export class AnswerTurn {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.summary = el("summary");
    this.reasoning = document.createTextNode("");
    const thoughts = el("div", { class: "text", tabindex: 0 }, this.reasoning);
    this.thinking = el("details", { class: "thinking", hidden: true }, this.summary, thoughts);
    this.content = el("div", { class: "content" });
    this.markdown = new MarkdownView(this.content);
    this.calls = el("div", { class: "calls" });
    this.foot = el("footer");
    const parts = [this.thinking, this.content, this.calls, this.foot];
    this.node = el("article", { class: "turn assistant", "aria-label": "Answer" }, parts);
  }

  /** `live`: it is being written. */
  update(live = true) {
    const { message } = this;
    this.node.setAttribute("aria-busy", live);
    this.#showReasoning(live);
    if (!message.meta.json) this.markdown.update(message.content);
    else if (message.content) this.content.replaceChildren(codeBlock(message.content, "json"));
    this.#showCalls();
    this.foot.replaceChildren(el("span", { class: "stats" }, statsText(message.meta, live)));
  }

  /** `last`: nothing follows it, so results of its calls may be given. */
  finish(last) {
    const { message, actions } = this;
    this.update(false);
    if (message.meta.error) this.foot.before(errorBox(message.meta.error));
    const asks = last && message.meta.finish === "tool_calls";
    if (asks) this.calls.append(resultForm(message.tool_calls, actions.sendResults));
    this.foot.append(
      button("Regenerate", () => actions.regenerate(message)),
      copyButton(() => message.content || message.reasoning_content),
    );
  }

  #showReasoning(live) {
    const { content, tool_calls: calls, reasoning_content: reasoning, meta } = this.message;
    const thinking = live && !content && !calls.length;
    this.thinking.hidden = !reasoning;
    if (thinking !== this.wasThinking) this.thinking.open = thinking; // then it is the reader's to open
    this.wasThinking = thinking;
    this.reasoning.appendData(reasoning.slice(this.reasoning.length));
    const facts = [count(meta.reasoning, "token"), seconds(meta.thinkSeconds)].filter(Boolean).join(", ");
    this.summary.textContent = (thinking ? "Thinking" : "Thought") + (facts && ` · ${facts}`);
  }

  #showCalls() {
    this.message.tool_calls.forEach((call, i) => {
      const shown = this.calls.children[i] ?? this.calls.appendChild(titled("", ""));
      shown.firstChild.textContent = `Calls ${call.function.name}`;
      shown.lastChild.textContent = call.function.arguments;
    });
  }
}

function resultForm(calls, send) {
  const areas = calls.map(() =>
    el("textarea", { rows: 2, required: true, placeholder: "Paste what the tool returned" }),
  );
  const labels = calls.map((call, i) => el("label", {}, `Result of ${call.function.name}`, areas[i]));
  const submit = el("button", { class: "primary" }, "Send and go on");
  const form = el("form", { class: "results" }, labels, submit);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: areas[i].value })));
  });
  return form;
}

export function errorBox({ message, status, type, param }) {
  const facts = [status || null, type, param && `field ${param}`].filter(Boolean).join(" · ");
  const title = el("strong", {}, facts || "No answer");
  return el("div", { class: "error", role: "alert" }, title, el("p", {}, message));
}

function statsText({ prompt, cached, output, ttft, speed, finish }, live) {
  const ends = { length: "cut off by the limit of tokens", stopped: "stopped", error: "not finished" };
  const facts = [];
  if (prompt != null) facts.push(`prompt ${prompt}`, `cached ${cached}`, `output ${output}`);
  if (ttft != null) facts.push(`first token ${seconds(ttft)}`);
  if (speed) facts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`);
  if (ends[finish]) facts.push(ends[finish]);
  return facts.join(" · ") || (live ? "Waiting for the first token" : "");
}

const count = (number, noun) => (number ? `${number} ${noun}${number === 1 ? "" : "s"}` : "");

function seconds(value) {
  if (value == null) return "";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}
