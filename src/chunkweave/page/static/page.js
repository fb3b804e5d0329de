// The page: a client of the HTTP API. It polls for changes every two seconds, and shows an error beside its cause.
import { SOURCES, alertOf, clock, columns, count, duration, element, legend, median, parameter, percent, plural, seconds, size, strip, table, tiles } from "./drawing.js";

const STORED_KEY = "chunkweave-key";
const EVERY_MS = 2000;
const COLUMNS = 60;
const LISTED = 30;
const USUAL = ["cacheblend", "query", "full"];
const FIRST_BODY = `{
    "messages": [{"role": "user", "content": "When does the ferry leave?"}],
    "documents": [
      "The ferry leaves at seven, at noon and at six.",
      "Pilots board ships two miles west of the lighthouse."
    ],
    "max_tokens": 24
  }`;
const byId = (id) => document.getElementById(id);

let server = null; // the answer of /v1/server, once there is one
let version = ""; // of the shown answer of /v1/requests

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function meaning(reply, text) {
  try {
    return JSON.parse(text).error.message;
  } catch { // not our JSON: show the status
    return `${reply.status} ${reply.statusText}`;
  }
}

// Returns the API's answer, null if unchanged, and the request's id. `body` is sent as JSON, or as a form.
async function call(path, body = null) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  const options = body ? { method: "POST", headers, body: isForm ? body : JSON.stringify(body) } : { headers };
  const [reply, text] = await fetch(path, options).then(async (came) => [came, await came.text()]).catch(() => {
    throw new ApiError(0, "the server does not answer");
  });
  if (reply.status === 401) byId("key-form").hidden = false;
  if (!reply.ok) throw new ApiError(reply.status, meaning(reply, text));
  return [text ? JSON.parse(text) : null, reply.headers.get("x-request-id")];
}

// --- now

function say(error) {
  byId("state").replaceChildren(...(error ? [alertOf(error.message)] : []));
  byId("state").hidden = !error;
}

async function look() {
  try {
    if (!server) {
      [server] = await call("/v1/server");
      showServer();
      await showCorpora();
    }
    const [now] = await call(`/v1/requests?limit=${COLUMNS}&since=${version}`);
    if (now) {
      version = now.version;
      showNow(now);
    }
    say(null);
  } catch (error) {
    version = "";
    if (error.status === 401) server = null;
    if (!(error instanceof ApiError)) console.error(error);
    say(error);
    byId("now").hidden = true;
  }
}

function keepFocus(change) {
  const focused = document.activeElement?.id;
  change();
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus({ preventScroll: true });
}

function showNow(now) {
  const answered = now.data;
  byId("now").hidden = false;
  byId("first-run").hidden = answered.length > 0;
  byId("answered").hidden = !answered.length;
  tiles(byId("current"), [["running", count(now.running)], ["waiting", count(now.waiting)], ...recent(answered)]);
  const { totals } = now;
  tiles(byId("totals"), [
    ["requests answered", count(totals.requests)],
    ["time saved, at least", duration(totals.time_saved_s)],
    ["tokens not computed", `${count(totals.tokens_not_computed)} of ${count(totals.prompt_tokens)}`],
  ]);
  byId("chart-title").textContent = `Tokens of the last ${plural(Math.min(answered.length, COLUMNS), "prompt")}`;
  const prompts = answered.reduce((sum, one) => sum + one.prompt_tokens, 0) || 1;
  const shares = Object.fromEntries(SOURCES.map((kind) => [kind, answered.reduce((sum, one) => sum + one.tokens_by_source[kind], 0) / prompts]));
  byId("chart").replaceChildren(columns(answered, COLUMNS), legend(SOURCES, shares));
  byId("stored").replaceChildren(...storedTable(now.stored ?? {}));
  keepFocus(() => {
    byId("requests").replaceChildren(...(answered.length ? [element("h3", {}, "Requests"), requestTable(answered.slice(0, LISTED))] : []));
    showUnanswered(now.unanswered);
  });
}

// Medians of the last requests, and the share of looked-up tokens that each tier had.
function recent(answered) {
  if (!answered.length) return [];
  const [ttft, full] = [median(answered.map((one) => one.ttft_s)), median(answered.map((one) => one.full_ttft_s))];
  const shown = [["first token, median", seconds(ttft)], ["full prefill, at least", seconds(full)]];
  if (ttft && full) shown.push(["sooner", `${(full / ttft).toFixed(1)}x`]);
  const lookedUp = answered.reduce((sum, one) => sum + one.looked_up_tokens, 0) || 1;
  const found = {};
  for (const one of answered) for (const [tier, tokens] of Object.entries(one.hits)) found[tier] = (found[tier] ?? 0) + tokens;
  return [...shown, ...Object.entries(found).sort().map(([tier, tokens]) => [`found: ${tier}`, percent(tokens / lookedUp)])];
}

function storedTable(stored) {
  const rows = Object.entries(stored).map(([tier, { bytes, segments }]) => [tier, size(bytes), count(segments)]);
  if (!rows.length) return [];
  return [element("h3", {}, "Stored"), table([["tier", "name"], ["KV", "number"], ["segments", "number"]], rows)];
}

const opener = (one) => element("button", { type: "button", class: "link name", id: `request-${one.id}`, "data-request": one.id }, clock(one.ended_s));
const tenantOf = (one) => (server.admin && server.tenants ? [one.tenant] : []);
const tenantHeading = () => (server.admin && server.tenants ? [["tenant", "name"]] : []);

function requestTable(requests) {
  const headings = [["at", "name"], ...tenantHeading(), ["method", "name"], ["tokens", "number roomy"], ["not computed", "number"], ["first token", "number"], ["full, at least", "number roomy"]];
  return table(headings, requests.map((one) => [
    opener(one), ...tenantOf(one), one.method, count(one.prompt_tokens), percent(one.tokens_not_computed / Math.max(1, one.prompt_tokens)),
    seconds(one.ttft_s), seconds(one.full_ttft_s),
  ]));
}

function showUnanswered(requests) {
  const details = byId("unanswered");
  details.hidden = !requests.length;
  details.firstElementChild.textContent = `${plural(requests.length, "request")} without an answer`;
  const headings = [["at", "name"], ...tenantHeading(), ["ended", "name"], ["why", ""]];
  const rows = requests.map((one) => [opener(one), ...tenantOf(one), one.outcome, one.error.replaceAll("_", " ")]);
  details.lastElementChild.replaceChildren(table(headings, rows));
}

byId("live").addEventListener("click", async ({ target }) => {
  const id = target.dataset.request;
  if (!id) return;
  const shown = byId("request");
  try {
    const [one] = await call(`/v1/requests/${id}`);
    const ended = one.finish_reason ? `, ended by ${one.finish_reason}` : "";
    const title = [element("h2", {}, `Request of ${clock(one.ended_s)}`), element("p", { class: "quiet wide" }, `${one.request_id}${ended}`)];
    shown.replaceChildren(...title, ...(one.method ? answerOf(one, one.full_ttft_s) : refusalOf(one)));
  } catch (error) {
    shown.replaceChildren(element("h2", {}, "One request"), alertOf(error.message));
  }
  shown.scrollIntoView({ block: "nearest" });
});

function refusalOf(one) {
  const code = one.error ? ` (${one.error.replaceAll("_", " ")})` : "";
  const why = one.message ?? "the message is shown to the request's own tenant only";
  return [element("p", {}, element("strong", {}, one.outcome.replaceAll("_", " ")), code), element("p", { class: "reason" }, why)];
}

// One answer's prompt as a strip of parts, its time as a strip of phases, and both in figures.
function answerOf(one, fullS) {
  const values = Object.entries(one.parameters).map(([name, value]) => `, ${name} ${parameter(value)}`).join("");
  const full = fullS === null ? "" : `, full prefill at least ${seconds(fullS)}`;
  const computed = one.prompt_tokens - one.tokens_not_computed;
  const how = element("p", { class: "how" }, element("strong", { class: "name" }, one.method), values, one.why ? ` (${one.why})` : "",
    ": first token after ", element("strong", {}, seconds(one.ttft_s)), `${full}; ${count(one.prompt_tokens)} tokens, of these ${count(computed)} computed`);
  const headings = [["part", ""], ["KV source", "name"], ["tier", "name roomy"], ["tokens", "number"], ["recomputed", "number"], ["why", "roomy"]];
  const rows = one.chunks.map((chunk) => [chunk.name, chunk.kv_source || "-", chunk.tier || "-", count(chunk.tokens), count(chunk.recomputed_tokens), parameter(chunk.reasons) || "-"]);
  const phases = one.phases.map((bar) => bar.label).join("; ");
  return [
    how,
    element("h4", {}, "Prompt"),
    strip(one.prompt, one.recomputed, "the prompt from its first token to its last, by the source of its KV"),
    legend(SOURCES),
    element("h4", {}, "Time to first token"),
    strip(one.phases, [], "where the time to the first token went", 16),
    legend(one.phases.map((bar) => bar.kind)),
    element("details", {}, element("summary", {}, "In figures"), table(headings, rows),
      element("p", {}, `${phases}; decoding ${seconds(one.decode_s)} for ${plural(one.new_tokens, "token")}.`)),
    ...(one.named ? [] : [element("p", { class: "quiet" }, "Another tenant's request: its parts are not named.")]),
  ];
}

// --- the server, and the first request

function showServer() {
  document.title = `chunkweave: ${server.model}`;
  byId("model").textContent = server.model;
  byId("version").textContent = `version ${server.version}`;
  // Exact methods run last: they store the whole prompt as a prefix, which the other methods would find.
  const methods = [...server.methods.filter((one) => !one.exact), ...server.methods.filter((one) => one.exact).reverse()];
  byId("methods").replaceChildren(...methods.map((one) => element("label", { class: "method" },
    element("input", { type: "checkbox", name: "methods", value: one.name, "data-ratio": one.parameters.includes("recompute_ratio"), checked: USUAL.includes(one.name) }),
    element("span", {}, element("strong", { class: "name" }, one.name), ` ${one.about}`))));
  const key = server.tenants ? ' \\\n  -H "Authorization: Bearer $CHUNKWEAVE_API_KEY"' : "";
  byId("curl").textContent = `curl ${location.origin}/v1/chat/completions${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${FIRST_BODY}'`;
  byId("copy").hidden = !navigator.clipboard;
}

byId("copy").addEventListener("click", async ({ target }) => {
  await navigator.clipboard.writeText(byId("curl").textContent);
  target.textContent = "Copied";
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED_KEY, byId("key").value);
  [server, version] = [null, ""];
  look();
});

// --- ask

function bodyOf(form, method, takesRatio) {
  const number = (name) => (form.get(name) ? Number(form.get(name)) : null);
  const corpus = form.get("corpus") || null;
  return {
    messages: [{ role: "user", content: form.get("question").trim() }],
    documents: corpus ? [] : passagesOf(form),
    max_tokens: number("max_tokens"),
    temperature: 0,
    chunkweave: { method, recompute_ratio: takesRatio ? number("ratio") : null, corpus, top_k: corpus ? number("top_k") : null },
  };
}

const passagesOf = (form) => (form.get("documents") ?? "").replaceAll("\r\n", "\n").split("\n\n").map((text) => text.trim()).filter(Boolean);

// Marks which answers are equal to that of full prefill, once it has arrived.
function compare(answers) {
  const full = answers.find((one) => one.method === "full");
  for (const { method, text, card } of answers) {
    const words = (of) => of.split(/(?<=\s)(?=\S)/);
    const [own, others] = [words(text), words(full?.text ?? "")];
    const differs = own.findIndex((word, at) => word !== others[at]);
    const [kind, said] = verdict(method, full !== undefined, text === full?.text, (differs < 0 ? own.length : differs) + 1);
    card.querySelector("h3").after(element("p", { class: `verdict ${kind}` }, said));
  }
}

function verdict(method, hasFull, same, word) {
  if (method === "full") return ["", "the answer that others are compared with"];
  if (!hasFull) return ["", "Choose full too to see whether the answers are equal."];
  return same ? ["same", "\u2713 same answer as full"] : ["differs", `\u2260 differs from full from word ${word} on`];
}

// One request after the other, so that none waits for another's work.
byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  const boxes = [...event.target.querySelectorAll("[name=methods]:checked")];
  const answers = [];
  const steps = boxes.map((box) => {
    const step = element("article", { class: "step" }, element("h3", {}, box.value), element("p", { class: "quiet" }, "waiting …"));
    return [step, async () => {
      const [answer, id] = await call("/v1/chat/completions", bodyOf(form, box.value, "ratio" in box.dataset));
      const text = answer.choices[0].message.content;
      const [one] = await call(`/v1/requests/${id}`);
      const card = element("article", { class: "answer", "data-method": box.value }, element("h3", {}, box.value), element("blockquote", {}, text), ...answerOf(one, null));
      answers.push({ method: box.value, text, card });
      return card;
    }];
  });
  const corpus = form.get("corpus") || null;
  const documents = corpus ? [] : passagesOf(form);
  if (form.get("warm") && (corpus || documents.length)) {
    steps.unshift([element("p", { class: "step" }, "Computing the passages …"), async () => {
      const [done] = await call("/v1/cache/warm", { documents, corpus });
      return element("p", {}, `${plural(done.chunks, "passage")}, ${done.computed} of them computed now.`);
    }]);
  }
  byId("answers").replaceChildren(...(boxes.length ? steps.map(([step]) => step) : [alertOf("choose a method")]));
  for (const [step, work] of steps) {
    if (!step.isConnected) return; // a newer question has replaced this one
    step.replaceWith(await work().catch((error) => alertOf(error.message)));
  }
  if (answers.length) compare(answers);
});

byId("corpus").addEventListener("change", ({ target }) => {
  byId("documents").disabled = Boolean(target.value);
});

// --- corpora

function fill(select, first, names, chosen = select.value) {
  select.replaceChildren(element("option", { value: "" }, first), ...names.map((name) => element("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "";
  select.dispatchEvent(new Event("change"));
}

async function showCorpora(chosen) {
  const [{ data }] = await call("/v1/corpora");
  fill(byId("corpus"), "none", data.map((one) => one.name), chosen);
  fill(byId("into"), "a new one", data.filter((one) => !one.shared).map((one) => one.name), chosen);
  const commands = server.pins ? ["warm", "pin", "unpin", "clear"] : ["warm", "clear"];
  const rows = data.map((one) => [
    one.shared ? `${one.name} (shared)` : one.name, count(one.documents), count(one.chunks),
    element("span", { class: "row" }, ...commands.map((command) => element("button", {
      type: "button", id: `${command}-${one.name}`, "data-command": command, "data-corpus": one.name,
      "data-question": command === "clear" && `Remove the KV of ${one.name} from every tier?`,
    }, command))),
  ]);
  const headings = [["corpus", "name"], ["documents", "number roomy"], ["chunks", "number"], ["its KV", "commands"]];
  const empty = element("p", { class: "quiet" }, "No corpus yet. Add files below, or start the server with ", element("code", {}, "--corpus FOLDER"), ", a folder that ",
    element("code", {}, "chunkweave ingest"), " has made.");
  const everything = element("button", { type: "button", id: "clear-all", "data-command": "clear", "data-question": "Remove all KV of all tenants from every tier?" }, "clear everything");
  keepFocus(() => byId("corpora-list").replaceChildren(data.length ? table(headings, rows) : empty, ...(server.admin ? [everything] : [])));
}

const report = (...nodes) => byId("corpora-said").replaceChildren(...nodes);
const counted = (done) => Object.entries(done).map(([name, value]) => `${value} ${name.replaceAll("_", " ")}`).join(", ");

byId("corpora-list").addEventListener("click", async ({ target }) => {
  const { command, corpus, question } = target.dataset;
  if (!command || (question && !confirm(question))) return;
  try {
    report(element("p", { class: "quiet" }, `${command} …`));
    const [done] = await call(`/v1/cache/${command}`, corpus ? { corpus } : { everything: true });
    report(element("p", {}, corpus ? `${corpus}: ${counted(done)}` : counted(done)));
  } catch (error) {
    report(alertOf(error.message));
  }
});

byId("into").addEventListener("change", ({ target }) => {
  byId("new-name").hidden = Boolean(target.value);
  byId("name").required = !target.value;
});

// A line for each list of documents in a reply that is not empty.
function outcome(done) {
  const named = (one) => (typeof one === "object" ? Object.values(one).join(": ") : one);
  const lists = Object.entries(done).filter(([, value]) => Array.isArray(value) && value.length);
  const lines = lists.map(([what, ids]) => `${ids.length} ${what.replaceAll("_", " ")}: ${ids.slice(0, 10).map(named).join(", ")}${ids.length > 10 ? ", …" : ""}`);
  return [...lines, `${done.corpus.name} has ${plural(done.corpus.documents, "document")} in ${plural(done.corpus.chunks, "chunk")}.`].map((line) => element("p", {}, line));
}

byId("upload").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = new FormData(event.target);
  const files = given.getAll("files");
  const form = new FormData();
  for (const file of files) form.append("files", file);
  const button = event.target.querySelector("button");
  const began = Date.now();
  const tell = () => report(element("p", { class: "quiet" }, `Adding ${plural(files.length, "file")} … ${Math.round((Date.now() - began) / 1000)} s`));
  const timer = setInterval(tell, 1000);
  button.disabled = true;
  tell();
  let name = given.get("into");
  try {
    if (!name) [{ name }] = await call("/v1/corpora", { name: given.get("name").trim() });
    const [done] = await call(`/v1/corpora/${name}/documents/files?update=true`, form);
    report(...outcome(done));
    event.target.reset();
  } catch (error) {
    report(alertOf(error.message));
  } finally {
    clearInterval(timer);
    button.disabled = false;
    await showCorpora(name).catch(() => {});
  }
});

window.addEventListener("focus", () => {
  if (server) showCorpora().catch(() => {});
});

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, EVERY_MS);
}
keepLooking();
