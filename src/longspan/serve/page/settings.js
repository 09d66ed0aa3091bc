// The settings: a form of plain texts, and what it means in a request. An empty field is not sent.

import { apiKey, modelNames } from "./api.js";
import { conversation, save } from "./conversation.js";
import { $, el } from "./dom.js";

const EXAMPLE_TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** A setting that can't be used; `field` is the element to mend. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** `onWrong` shows the settings, with the field that must be mended. */
export function startSettings(onWrong) {
  const form = $("settings-form");
  for (const field of form.querySelectorAll("input, textarea")) addNote(field);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    for (const field of form.elements) if (field.name) conversation.settings[field.name] = field.value;
    save();
    showSettings();
  });
  $("api-key").value = apiKey.get();
  $("api-key").addEventListener("input", () => apiKey.set($("api-key").value));
  $("api-key").addEventListener("change", () => loadModels(onWrong));
  $("example-tool").addEventListener("click", offerTool);
  showSettings();
  loadModels(onWrong);
}

/** Declares the example of a tool, unless others are declared. */
export function offerTool() {
  if ($("tools").value.trim()) return;
  $("tools").value = JSON.stringify(EXAMPLE_TOOL, null, 2);
  $("tools").dispatchEvent(new Event("input", { bubbles: true }));
}

/** Puts the conversation's settings into the form. */
export function showSettings() {
  for (const field of $("settings-form").elements) {
    if (!field.name) continue;
    const value = conversation.settings[field.name] ?? field.dataset.default ?? "";
    if (field.value !== value) field.value = value;
    if (field.note) setNote(field, "");
  }
  $("schema-field").hidden = $("format").value !== "json_schema";
}

/** The fields of a request. Throws SettingError. */
export function requestFields() {
  const fields = {};
  if ($("model").value) fields.model = $("model").value;
  for (const name of NUMBERS) {
    const field = $(name);
    if (field.validity.badInput || !field.checkValidity()) throw invalid(field, field.validationMessage);
    if (field.value !== "") fields[name] = Number(field.value);
  }
  if ($("effort").value) fields.reasoning_effort = $("effort").value;
  const tools = json($("tools"));
  if (tools !== undefined) {
    if (!Array.isArray(tools)) throw invalid($("tools"), "A list of tools is expected: [ ... ].");
    fields.tools = tools;
  }
  if ($("format").value === "json_object") fields.response_format = { type: "json_object" };
  if ($("format").value === "json_schema") {
    const schema = json($("schema"));
    if (schema === undefined) throw invalid($("schema"), "Give a JSON schema, or choose another format.");
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  return fields;
}

function json(field) {
  if (!field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    throw invalid(field, `Not JSON: ${error.message}.`);
  }
}

function invalid(field, message) {
  setNote(field, message);
  return new SettingError(field, message);
}

function addNote(field) {
  field.note = el("p", { class: "note", id: `${field.id}-note`, role: "alert" });
  field.setAttribute("aria-describedby", field.note.id);
  field.after(field.note);
}

/** Says what is wrong with a field; nothing if `message` is empty. */
function setNote(field, message) {
  field.setAttribute("aria-invalid", message !== "");
  field.note.textContent = message;
}

/** Fills the list of models; asks for the key if the server wants one. */
async function loadModels(onWrong) {
  try {
    const names = await modelNames();
    $("model").replaceChildren(...names.map((name) => new Option(name)));
    setNote($("api-key"), "");
  } catch (error) {
    setNote($("api-key"), error.message);
    if (error.status === 401) onWrong($("api-key"));
  }
}
