// The conversation as it is shown: a question and its answer make a turn.
import { render } from "./markdown.js";

export function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}

function button(text, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // over plain HTTP from another machine there is no clipboard
    const area = element("textarea", "", text);
    pressed.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 2000);
}

function rates(acceptance) {
  const rows = Object.entries(acceptance).map(([pair, rate]) => {
    const meter = element("meter", "");
    meter.value = rate;
    meter.setAttribute("aria-label", pair);
    return element("tr", "", ...[pair, `${Math.round(100 * rate)} %`, meter].map((each) => element("td", "", each)));
  });
  const table = element("table", "rates", element("tbody", "", ...rows));
  return rows.length ? [element("details", "", element("summary", "", "Accepted drafts"), table)] : [];
}

export class Turn {
  constructor(question, source, thread) {
    this.text = this.thought = "";
    this.isDrawn = true;
    this.answer = element("div", "markdown");
    this.thinking = element("p", "thought");
    this.details = element("details", "", element("summary", "", "Thinking"), this.thinking);
    this.details.hidden = true;
    this.facts = element("div", "facts");
    const asked = element("div", "question", ...(source ? [element("span", "source", source)] : []), question);
    this.article = element("article", "turn", asked, this.details, this.answer, this.facts);
    this.article.setAttribute("aria-busy", "true");
    thread.append(this.article);
  }

  add(delta) {
    this.text += delta.content || "";
    this.thought += delta.reasoning_content || "";
    if (this.isDrawn) requestAnimationFrame(() => this.draw());
    this.isDrawn = false;
  }

  draw() {
    this.isDrawn = true;
    render(this.answer, this.text);
    this.thinking.textContent = this.thought;
    this.details.hidden = !this.thought;
  }

  end(facts, acceptance) {
    this.draw();
    this.article.removeAttribute("aria-busy");
    this.facts.append(button("Copy", (pressed) => copy(this.text, pressed)), element("span", "", facts));
    this.facts.after(...rates(acceptance));
  }

  remove() {
    this.article.remove();
  }
}
