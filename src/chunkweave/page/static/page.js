// The API key goes with every request, and errors are shown where the answer would have been.
const stored = "chunkweave-key";

document.body.addEventListener("htmx:configRequest", (event) => {
  const key = sessionStorage.getItem(stored);
  if (key) event.detail.headers.Authorization = `Bearer ${key}`;
});

document.body.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail;
  if (xhr.status < 400) return;
  let said = `${xhr.status} ${xhr.statusText}`;
  try {
    said = JSON.parse(xhr.responseText).error.message;
  } catch { /* not ours: the status says enough */ }
  const shown = document.createElement("p");
  shown.className = "error";
  shown.setAttribute("role", "alert");
  shown.textContent = said;
  event.detail.serverResponse = shown.outerHTML;
  event.detail.shouldSwap = true;
  event.detail.isError = false;
});

document.getElementById("key-form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(stored, document.getElementById("key").value);
  htmx.trigger(document.body, "key");
});
