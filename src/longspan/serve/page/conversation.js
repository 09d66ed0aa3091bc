// The conversation: OpenAI's messages, with `meta` on an answer. It survives a reload and travels as JSON.
// `meta` has finish (why it ended; "stopped" and "error" are the page's own), error, json (it was asked for),
// and numbers: tokens (prompt, cached, output, reasoning), seconds (ttft, thinkSeconds), speed.

const STORED = "longspan.conversation";
const NUMBERS = ["prompt", "cached", "output", "reasoning", "ttft", "thinkSeconds", "speed"];

export const conversation = {
  messages: [],
  settings: {}, // field of the settings form -> what was typed there
};

/** Messages as the server takes them. Calls of an answer that did not come to its end are left out. */
export function requestMessages() {
  const messages = conversation.messages.map((message) => {
    if (message.role !== "assistant") return message;
    const { content, reasoning_content, tool_calls, meta } = message;
    const calls = meta?.finish === "tool_calls" ? tool_calls : [];
    return {
      role: "assistant",
      content,
      ...(reasoning_content && { reasoning_content }),
      ...(calls.length && { tool_calls: calls }),
    };
  });
  const said = messages.filter(
    (message) =>
      message.role !== "assistant" || message.content || message.reasoning_content || message.tool_calls,
  );
  const system = conversation.settings.system?.trim();
  return system ? [{ role: "system", content: system }, ...said] : said;
}

export const newAnswer = (json) => ({
  role: "assistant",
  content: "",
  reasoning_content: "",
  tool_calls: [],
  meta: { json },
});

/** Keeps it for the next visit. Returns false if the browser has no room for it. */
export function save() {
  try {
    localStorage.setItem(STORED, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function restore() {
  try {
    const stored = localStorage.getItem(STORED);
    if (stored) Object.assign(conversation, checked(JSON.parse(stored)));
  } catch {
    localStorage.removeItem(STORED); // of another version
  }
}

export const exportText = () => JSON.stringify(conversation, null, 2);

/** Takes the place of the conversation. Throws an Error that says what is wrong with `text`. */
export function importText(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}.`);
  }
  Object.assign(conversation, checked(value));
}

/** A conversation from our own export, or from any list of OpenAI's messages. */
function checked(value) {
  const list = Array.isArray(value) ? value : value?.messages;
  if (!Array.isArray(list)) {
    throw new Error("Found no messages: a list, or an object with `messages`, is expected.");
  }
  const settings = {};
  for (const [name, typed] of Object.entries(value.settings ?? {})) settings[name] = String(typed);
  const messages = [];
  for (const [i, message] of list.entries()) {
    if (message?.role === "system" && i === 0) settings.system = text(message.content, i);
    else messages.push(checkedMessage(message, i));
  }
  return { messages, settings };
}

function checkedMessage(message, i) {
  const content = text(message?.content, i);
  switch (message?.role) {
    case "user":
      return { role: "user", content };
    case "tool":
      return { role: "tool", tool_call_id: text(message.tool_call_id, i), content };
    case "assistant": {
      const tool_calls = checkedCalls(message.tool_calls ?? [], i);
      const reasoning_content = text(message.reasoning_content, i);
      const meta = message.meta
        ? checkedMeta(message.meta, i)
        : { finish: tool_calls.length ? "tool_calls" : "stop" };
      return { role: "assistant", content, reasoning_content, tool_calls, meta };
    }
    default:
      throw new Error(
        `messages[${i}].role is ${JSON.stringify(message?.role)}; user, assistant or tool is expected.`,
      );
  }
}

function checkedCalls(calls, i) {
  if (!Array.isArray(calls)) throw new Error(`messages[${i}].tool_calls is no list.`);
  return calls.map((call) => ({
    id: text(call?.id, i),
    type: "function",
    function: { name: text(call?.function?.name, i), arguments: text(call?.function?.arguments, i) },
  }));
}

/** What may be shown of it. An answer without an end was being written when the page was left. */
function checkedMeta(given, i) {
  const meta = { finish: String(given.finish ?? "stopped"), json: given.json === true };
  for (const name of NUMBERS) if (typeof given[name] === "number") meta[name] = given[name];
  const { message, status, type, param } = given.error ?? {};
  if (!message) return meta;
  const [kind, field] = [text(type, i), text(param, i)];
  return { ...meta, error: { message: String(message), status: Number(status), type: kind, param: field } };
}

function text(value, i) {
  if (value == null) return "";
  if (typeof value === "string") return value;
  throw new Error(`messages[${i}] has ${JSON.stringify(value).slice(0, 80)} where text is expected.`);
}
