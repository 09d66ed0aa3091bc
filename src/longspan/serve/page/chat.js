// The chat: sends the conversation, shows the answer as it comes; it can be stopped, edited and asked again.

import { Answer } from "./answer.js";
import { streamChat } from "./api.js";
import { conversation, exportText, importText, newAnswer, requestMessages, save } from "./conversation.js";
import { $, el, onNextFrame } from "./dom.js";
import { SettingError, offerTool, requestFields, showSettings } from "./settings.js";
import { AnswerTurn, errorBox, toolTurn, userTurn } from "./turns.js";

let running = null; // AbortController of the answer being written
let openSettings = () => {};

const actions = {
  edit(message, content) {
    ask(conversation.messages.slice(0, conversation.messages.indexOf(message)), { role: "user", content });
  },
  regenerate(message) {
    ask(conversation.messages.slice(0, conversation.messages.indexOf(message)));
  },
  sendResults(results) {
    ask(conversation.messages, ...results);
  },
};

/** `onSettingError` shows the settings, one of which can't be used. */
export function startChat(onSettingError) {
  openSettings = onSettingError;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => replaceConversation(() => (conversation.messages = [])));
  $("export").addEventListener("click", download);
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", upload);
  for (const chip of $("welcome").querySelectorAll("button")) {
    chip.addEventListener("click", () => {
      if ("tool" in chip.dataset) offerTool();
      ask([], { role: "user", content: chip.textContent });
    });
  }
  addEventListener("beforeunload", () => running?.abort()); // or its connection would seem to have failed
  addEventListener("pagehide", save);
  show();
}

function send() {
  const content = $("question").value;
  if (running || !content.trim()) return;
  if (ask(conversation.messages, { role: "user", content })) $("question").value = "";
}

/** Asks for an answer to `messages` and `added`. Returns false if the settings don't allow it. */
function ask(messages, ...added) {
  let fields;
  try {
    fields = requestFields();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    openSettings(error.field);
    return false;
  }
  running?.abort();
  conversation.messages = [...messages, ...added];
  const body = { ...fields, messages: requestMessages() };
  const message = newAnswer("response_format" in fields);
  conversation.messages.push(message);
  receive(message, body, show());
  return true;
}

/** Fills `message` with the answer to `body`, and shows it in `turn`. */
async function receive(message, body, turn) {
  const abort = (running = new AbortController());
  const answer = new Answer(message);
  const draw = onNextFrame(() => running === abort && following(() => turn.update()));
  setBusy(true);
  draw();
  try {
    for await (const chunk of streamChat(body, abort.signal)) {
      answer.add(chunk);
      draw();
    }
  } catch (error) {
    if (error.name === "AbortError") message.meta.finish = "stopped";
    else {
      const { status, type, param } = error;
      message.meta.finish = "error";
      message.meta.error = { message: error.message, status, type, param };
    }
  }
  if (running !== abort) return; // another conversation has taken its place
  running = null;
  following(() => turn.finish(true));
  setBusy(false);
  announce(message);
  store();
}

/** The conversation anew. Returns the last answer's turn. */
function show() {
  const { messages } = conversation;
  let turn = null;
  const names = new Map(
    messages.flatMap((m) => (m.tool_calls ?? []).map((call) => [call.id, call.function.name])),
  );
  const nodes = messages.map((message, i) => {
    if (message.role === "user") return userTurn(message, actions);
    if (message.role === "tool") return toolTurn(message, names.get(message.tool_call_id));
    turn = new AnswerTurn(message, actions);
    const last = i === messages.length - 1;
    if (message.meta.finish || !last) turn.finish(last);
    return turn.node;
  });
  $("turns").replaceChildren(...nodes);
  $("welcome").hidden = messages.length > 0;
  $("scroller").scrollTop = $("scroller").scrollHeight;
  store();
  return turn;
}

function store() {
  if (!save()) notice("The browser has no room left to keep this conversation: export it.");
}

function replaceConversation(change) {
  running?.abort();
  running = null;
  setBusy(false);
  change();
  showSettings();
  show();
  $("question").focus();
}

function setBusy(busy) {
  $("stop").hidden = !busy;
  $("send").hidden = busy;
  $("composer").setAttribute("aria-busy", busy);
}

/** Does `change`, then stays at the end of the conversation if the reader was there. */
function following(change) {
  const box = $("scroller");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** For who listens to the page: the whole answer once, not every piece of it. */
function announce({ content, tool_calls: calls, meta }) {
  const called = calls.map((call) => `Calls ${call.function.name}.`).join(" ");
  $("status").textContent = meta.error
    ? ""
    : `${meta.finish === "stopped" ? "Stopped. " : ""}${content} ${called}`;
}

function notice(message) {
  $("turns").append(errorBox({ message, type: "Notice" }));
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

function download() {
  const url = URL.createObjectURL(new Blob([exportText()], { type: "application/json" }));
  el("a", { href: url, download: "conversation.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function upload() {
  const [file] = $("file").files;
  $("file").value = ""; // so that the same file can be chosen again
  if (!file) return;
  const text = await file.text();
  try {
    replaceConversation(() => importText(text));
  } catch (error) {
    notice(error.message);
  }
}
