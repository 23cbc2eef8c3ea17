// Markdown -> DOM nodes. The source is not trusted: its text becomes text nodes, its links lead to http(s) alone, and
// nothing is loaded. Patterns are bounded: no source makes them slow.

const FENCE = /^ {0,3}(`{3,}|~{3,})/, HEADING = /^ {0,3}(#{1,6})\s+([^]*)$/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,20})([-*+]|\d{1,9}[.)])\s+([^]*)$/, QUOTE = /^ {0,3}> ?([^]*)$/;
const INLINE = new RegExp([
  /\\(?<escaped>[\\`*_{}[\]()#+.!~>|-])/,
  /(?<ticks>`{1,3})(?!`)(?<code>[^`]{1,1000})\k<ticks>(?!`)/,
  /\[(?<label>[^[\]]{1,300})\]\((?<target>[^\s()]{1,1000}(?:\([^\s()]{0,200}\)[^\s()]{0,300})?)\)/,
  /(?<double>\*\*|(?<!\w)__)(?=\S)(?<strong>[^]{1,600}?)(?<=\S)\k<double>/,
  /(?<single>\*|(?<!\w)_)(?=[^\s*_])(?<em>[^]{1,600}?)(?<=[^\s*_])\k<single>(?!\w)/,
].map((each) => each.source).join("|"), "g");

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

function address(text) {
  try {
    const found = new URL(text);
    return ["http:", "https:"].includes(found.protocol) ? found.href : null;
  } catch {
    return null;  // relative, or none
  }
}

function link(whole, label, target) {
  const found = address(target);
  if (!found) return whole;
  const made = element("a", ...inline(label));
  Object.assign(made, { href: found, title: found, target: "_blank", rel: "noopener noreferrer" });
  return made;
}

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const { escaped, code, label, target, strong, em } = match.groups;
    nodes.push(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (escaped) nodes.push(escaped);
    else if (code) nodes.push(element("code", code));
    else if (label) nodes.push(link(match[0], label, target));
    else nodes.push(element(strong ? "strong" : "em", ...inline(strong || em)));
  }
  nodes.push(text.slice(from));
  return nodes.filter((each) => each !== "");
}

function closes(line, fence) {
  return line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
}

// The number of lines of the fenced code that begins with the first line; its end may not have come yet.
function fenceLength(lines) {
  const [, fence] = FENCE.exec(lines[0]);
  const end = lines.findIndex((line, n) => n && closes(line, fence));
  return end < 0 ? lines.length : end + 1;
}

function length(lines) {
  if (FENCE.test(lines[0])) return fenceLength(lines);
  if (HEADING.test(lines[0]) || RULE.test(lines[0])) return 1;
  const isItem = ITEM.test(lines[0]), isQuote = QUOTE.test(lines[0]);
  let n = 1;
  for (; n < lines.length; n++) {
    const line = lines[n], blank = !line.trim();
    if (isItem && blank && /^(\s|[-*+]\s|\d{1,9}[.)]\s)\s*\S/.test(lines[n + 1] || "")) continue;  // a loose list
    if (blank || (isQuote && !QUOTE.test(line))) break;
    if (FENCE.test(line) && !(isItem && line.startsWith(" "))) break;
    if (HEADING.test(line) || RULE.test(line)) break;
    if (!isItem && !isQuote && (ITEM.test(line) || QUOTE.test(line))) break;
  }
  return n;
}

// The sources of the blocks of a text, in order.
function split(text) {
  const blocks = [];
  for (let lines = text.split("\n"); lines.length;) {
    if (!lines[0].trim()) {
      lines.shift();
      continue;
    }
    blocks.push(lines.splice(0, length(lines)).join("\n"));
  }
  return blocks;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]), made = element(/\d/.test(mark) ? "ol" : "ul");
  if (made.localName === "ol") made.start = Number.parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^ {1,4}/, ""));
  }
  for (const [first, ...rest] of items) {
    const more = rest.length ? split(rest.join("\n")).map((each) => block(each, depth + 1)) : [];
    made.append(element("li", ...inline(first), ...more));
  }
  return made;
}

function block(source, depth = 0) {
  const lines = source.split("\n"), heading = HEADING.exec(source);
  if (depth > 10) return element("p", source);  // nested to no purpose
  if (FENCE.test(source)) {
    const [, fence] = FENCE.exec(source), isClosed = lines.length > 1 && closes(lines.at(-1), fence);
    return element("pre", element("code", lines.slice(1, isClosed ? -1 : undefined).join("\n")));
  }
  if (heading && lines.length === 1) return element(`h${heading[1].length}`, ...inline(heading[2]));
  if (RULE.test(source)) return element("hr");
  if (ITEM.test(lines[0])) return list(lines, depth);
  if (QUOTE.test(lines[0])) {
    const inner = lines.map((line) => QUOTE.exec(line)[1]).join("\n");
    return element("blockquote", ...split(inner).map((each) => block(each, depth + 1)));
  }
  return element("p", ...inline(source));
}

// Show a text that grows: of its blocks, only those that have changed are made again, so that a selection stays.
export function render(container, text) {
  const shown = [...container.children];
  const blocks = split(text);
  blocks.forEach((source, n) => {
    if (shown[n] && shown[n].source === source) return;
    const made = Object.assign(block(source), { source });
    if (shown[n]) shown[n].replaceWith(made);
    else container.append(made);
  });
  shown.slice(blocks.length).forEach((each) => each.remove());
}
