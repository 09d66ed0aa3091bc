// The page: which view is shown, and who starts.

import { startChat } from "./chat.js";
import { restore } from "./conversation.js";
import { $ } from "./dom.js";
import { startEngine } from "./engine.js";
import { startSettings } from "./settings.js";

const views = [...document.querySelectorAll("nav button")];

/** Wide windows show the chat beside the other views, narrow ones one view at a time (style.css). */
function showView(view) {
  document.body.dataset.view = view;
  for (const button of views) button.setAttribute("aria-pressed", button.dataset.shows === view);
  document.dispatchEvent(new CustomEvent("view", { detail: view }));
}

function showField(field) {
  showView("settings");
  field.focus();
}

for (const button of views) button.addEventListener("click", () => showView(button.dataset.shows));
restore();
showView("chat");
startEngine();
startChat(showField);
startSettings(showField);
$("question").focus();
