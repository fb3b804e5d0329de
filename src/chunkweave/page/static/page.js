// The API key goes with every request, and errors are shown where the answer would have been.
const stored = "chunkweave-key";
const byId = (id) => document.getElementById(id);

function authorization() {
  const key = sessionStorage.getItem(stored);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function meaning(status, text) {
  try {
    return JSON.parse(text).error.message;
  } catch { // not ours: the status says enough
    return status;
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function alertOf(said) {
  const shown = element("p", "error", said);
  shown.setAttribute("role", "alert");
  return shown;
}

// A piece of the page, or with a body the answer of the API; and the id of the request.
async function fetched(path, body) {
  const headers = { ...authorization(), ...(body ? { "Content-Type": "application/json" } : { "HX-Request": "true" }) };
  const reply = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  const text = await reply.text();
  if (!reply.ok) throw new Error(meaning(`${reply.status} ${reply.statusText}`, text));
  return [body ? JSON.parse(text) : text, reply.headers.get("x-request-id")];
}

document.body.addEventListener("htmx:configRequest", (event) => {
  Object.assign(event.detail.headers, authorization());
});

document.body.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail;
  if (xhr.status < 400) return;
  event.detail.serverResponse = alertOf(meaning(`${xhr.status} ${xhr.statusText}`, xhr.responseText)).outerHTML;
  event.detail.shouldSwap = true;
  event.detail.isError = false;
});

byId("key-form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(stored, byId("key").value);
  htmx.trigger(document.body, "key");
});

// One after the other, so that none waits for another's work.
byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  const number = (name) => (form.get(name) ? Number(form.get(name)) : null);
  const corpus = form.get("corpus") || null;
  const documents = form.get("documents").replaceAll("\r\n", "\n").split("\n\n").map((text) => text.trim()).filter(Boolean);
  const methods = [...event.target.querySelectorAll("[name=methods]:checked")];
  const steps = methods.map((box) => {
    const step = element("article", "step", "");
    step.append(element("h3", "", box.value), element("p", "quiet", "waiting …"));
    return [step, async () => {
      const [answer, id] = await fetched("/v1/chat/completions", {
        messages: [{ role: "user", content: form.get("question").trim() }],
        documents,
        max_tokens: number("max_tokens"),
        temperature: 0,
        chunkweave: {
          method: box.value,
          recompute_ratio: "ratio" in box.dataset ? number("ratio") : null,
          corpus,
          top_k: corpus ? number("top_k") : null,
        },
      });
      const [report] = await fetched(`/v1/page/requests/${id}?compared=true`);
      const shown = element("article", "answer", "");
      shown.innerHTML = report; // ours, with every value escaped
      shown.prepend(element("h3", "", box.value), element("blockquote", "", answer.choices[0].message.content));
      return shown;
    }];
  });
  if (form.get("warm") && (corpus || documents.length)) {
    steps.unshift([element("p", "step", "Computing the passages …"), async () => {
      const [done] = await fetched("/v1/cache/warm", { documents, corpus });
      return element("p", "", `${done.chunks} passages, ${done.computed} of them computed now.`);
    }]);
  }
  byId("answers").replaceChildren(...(methods.length ? steps.map(([step]) => step) : [alertOf("choose a method")]));
  for (const [step, work] of steps) {
    if (!step.isConnected) return; // asked again meanwhile
    step.replaceWith(await work().catch((error) => alertOf(error.message)));
  }
});

byId("corpora").addEventListener("click", async ({ target, currentTarget }) => {
  const { command, corpus, question } = target.dataset;
  if (!command || (question && !confirm(question))) return;
  try {
    const [done] = await fetched(`/v1/cache/${command}`, corpus ? { corpus } : { everything: true });
    const counts = Object.entries(done).map(([name, value]) => `${value} ${name.replaceAll("_", " ")}`).join(", ");
    currentTarget.innerHTML = (await fetched("/v1/page/corpora"))[0]; // ours, with every value escaped
    currentTarget.querySelector("[role=status]").textContent = corpus ? `${corpus}: ${counts}` : counts;
  } catch (error) {
    currentTarget.replaceChildren(alertOf(error.message));
  }
});
