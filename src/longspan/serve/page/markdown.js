// Markdown as models write it -> DOM. Every piece of text becomes a text node, so it can't be markup.
//
// Blocks: fenced code, headings, rules, quotes, lists, tables, paragraphs (their line breaks are kept).
// Inline: code, strong, emphasis, strikethrough, links to http(s) and mailto. All else is shown as written.
// A block ends only where a line begins another one, so text may grow at its end without changing earlier
// blocks: `MarkdownView` relies on it. Nesting has a limit, and time is linear in the text.

import { copyButton, el } from "./dom.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;

/** Shows a text that grows; finished blocks are never built again. */
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.settledText = 0; // characters in finished blocks
    this.settledNodes = 0;
  }

  update(text) {
    const lines = text.slice(this.settledText).split("\n");
    const blocks = parse(lines, 0);
    while (this.container.childNodes.length > this.settledNodes) this.container.lastChild.remove();
    for (const { node } of blocks) this.container.append(node);
    const last = blocks.at(-1);
    // While its first line is incomplete, the last block may yet turn out to belong to the one before it.
    if (blocks.length > 1 && last.from < lines.length - 1) {
      this.settledText += lines.slice(0, last.from).join("\n").length + 1;
      this.settledNodes += blocks.length - 1;
    }
  }
}

/** Blocks of `lines` as {from, node}: `from` is the number of the first line. */
function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [node, end] = block(lines, at, depth);
    blocks.push({ from: at, node });
    at = end;
  }
  return blocks;
}

/** [node, end] of the block that begins at line `at`. */
function block(lines, at, depth) {
  const line = lines[at];
  let match;
  if ((match = line.match(FENCE))) return code(lines, at, match[1], match[2]);
  if ((match = line.match(HEADING)))
    return [el(`h${Math.min(match[1].length + 2, 6)}`, {}, inline(match[2])), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (startsTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end, depth)) end++;
  return [el("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

function startsBlock(lines, at, depth) {
  const line = lines[at];
  const nests = depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line));
  return nests || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || startsTable(lines, at);
}

function code(lines, at, fence, language) {
  const closes = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closes.test(lines[end])) end++;
  const text = lines.slice(at + 1, end).join("\n");
  return [codeBlock(text, language), Math.min(end + 1, lines.length)];
}

export function codeBlock(text, language) {
  const head = el(
    "figcaption",
    {},
    el("span", {}, language),
    copyButton(() => text),
  );
  return el("figure", { class: "code" }, head, el("pre", { tabindex: 0 }, el("code", {}, text)));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [
    el(
      "blockquote",
      {},
      parse(inner, depth + 1).map((block) => block.node),
    ),
    end,
  ];
}

/** Items of one kind. An item goes on with lines deeper than its marker, or with unmarked ones after text. */
function list(lines, at, depth) {
  const [, indent, marker] = lines[at].match(ITEM);
  const ordered = /\d/.test(marker);
  const node = ordered ? el("ol", { start: parseInt(marker, 10) }) : el("ul");
  const isItem = (line) => {
    const match = line.match(ITEM);
    return (
      match && match[1].length <= indent.length + 1 && /\d/.test(match[2]) === ordered && !RULE.test(line)
    );
  };
  while (at < lines.length && isItem(lines[at])) {
    const width = lines[at].match(ITEM)[0].length || 1;
    const inner = [lines[at].slice(width)];
    at++;
    for (; at < lines.length; at++) {
      const line = lines[at];
      const deeper = line.search(/\S/) > indent.length + 1;
      const goesOn = line.trim() && lines[at - 1].trim() && !startsBlock(lines, at, depth);
      const gap = !line.trim() && at + 1 < lines.length && lines[at + 1].search(/\S/) > indent.length + 1;
      if (!deeper && !goesOn && !gap) break;
      inner.push(line.slice(Math.min(width, Math.max(line.search(/\S/), 0))));
    }
    node.append(item(inner, depth));
    if (at + 1 < lines.length && !lines[at].trim() && isItem(lines[at + 1])) at++; // items may stand apart
  }
  return [node, at];
}

/** A first paragraph stands in the item itself. */
function item(lines, depth) {
  const nodes = parse(lines, depth + 1).map((block) => block.node);
  if (nodes[0]?.tagName !== "P") return el("li", {}, nodes);
  return el("li", {}, [...nodes[0].childNodes], nodes.slice(1));
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function startsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.length === cells(lines[at]).length && rule.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null,
  );
  const row = (line, tag) =>
    el(
      "tr",
      {},
      sides.map((side, i) => el(tag, { class: side }, inline(cells(line)[i] ?? ""))),
    );
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const whole = el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, body));
  return [el("div", { class: "scroll", tabindex: 0 }, whole), end];
}

const SPECIAL = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|~~|_{1,2}|\[|https?:\/\/[^\s<>"`*]+/g;
const LINK = /\[([^\]\n]{1,500})\]\(((?:https?:\/\/|mailto:)[^()\s]{1,2000})\)/y;
const TAGS = {
  "*": ["em"],
  _: ["em"],
  "**": ["strong"],
  __: ["strong"],
  "~~": ["del"],
  "***": ["strong", "em"],
};

/** Inline nodes of a text. */
function inline(text, depth = 0) {
  const nodes = [];
  const unclosed = new Set(); // markers that nothing closes any more, so that they are looked for once
  let done = 0;
  let match;
  const special = new RegExp(SPECIAL);
  while (depth < MAX_DEPTH && (match = special.exec(text))) {
    const found = span(text, match[0], match.index, unclosed, depth);
    if (!found) continue;
    nodes.push(text.slice(done, match.index), found.node);
    done = special.lastIndex = found.end;
  }
  nodes.push(text.slice(done));
  return nodes.filter((node) => node !== "");
}

/** {node, end} of what begins with `mark` at `at`, or null if that is just text. */
function span(text, mark, at, unclosed, depth) {
  const begin = at + mark.length;
  if (mark[0] === "\\") return { node: mark[1], end: begin };
  if (mark[0] === "h") {
    const url = mark.replace(/[.,;:!?)\]}'*_]+$/, "");
    return { node: link(url, [url]), end: at + url.length };
  }
  if (mark === "[") {
    LINK.lastIndex = at;
    const match = LINK.exec(text);
    return match && { node: link(match[2], inline(match[1], depth + 1)), end: LINK.lastIndex };
  }
  if (unclosed.has(mark)) return null;
  const end = mark[0] === "`" ? codeEnd(text, mark, begin) : emphasisEnd(text, mark, at);
  if (end === null) return null; // it opens nothing here, and may elsewhere
  if (end < 0) {
    unclosed.add(mark);
    return null;
  }
  const inside = text.slice(begin, end);
  if (mark[0] === "`")
    return { node: el("code", {}, inside.replace(/^ (.*\S.*) $/, "$1")), end: end + mark.length };
  const node = TAGS[mark].reduceRight((inner, tag) => el(tag, {}, inner), inline(inside, depth + 1));
  return { node, end: end + mark.length };
}

function codeEnd(text, mark, begin) {
  for (const run of text.slice(begin).matchAll(/`+/g))
    if (run[0].length === mark.length) return begin + run.index;
  return -1;
}

/** Where `mark` at `at` is closed; -1 if nowhere, null if it can't open here (as in 3 * 4 or snake_case). */
function emphasisEnd(text, mark, at) {
  const word = /[\p{L}\p{N}]/u;
  const begin = at + mark.length;
  if (!text[begin] || /\s/.test(text[begin]) || (mark[0] === "_" && word.test(text[at - 1] ?? "")))
    return null;
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length] ?? "";
    const longer = after === mark[0] || (text[end - 1] === mark[0] && mark.length < 3);
    if (!longer && !/\s/.test(text[end - 1]) && !(mark[0] === "_" && word.test(after))) return end;
  }
  return -1;
}

const link = (url, children) =>
  el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, children);
