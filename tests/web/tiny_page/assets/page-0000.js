// The least that signs in and out: what the page of web/ does, for tests of cookies and headers in a real browser.
const form = document.querySelector("form");
const inside = document.querySelector("details");
let session = null;

function show(next) {
  session = next;
  form.hidden = session !== null;
  inside.hidden = session === null;
  document.querySelector("summary").textContent = session?.name ?? "";
}

async function signIn(secret) {
  const reply = await fetch("/v1/sessions", { method: "POST", headers: { Authorization: `Bearer ${secret}` } });
  const said = await reply.json();
  document.querySelector("[role=alert]").textContent = reply.ok ? "" : said.detail;
  if (reply.ok) show(said);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(form.token.value);
});
document.querySelector("#out").addEventListener("click", async () => {
  await fetch("/v1/sessions/current", { method: "DELETE", headers: { "X-Holdfast-CSRF": session.csrf_token } });
  show(null);
});

const code = new URLSearchParams(location.hash.slice(1)).get("code");
history.replaceState(null, "", location.pathname);
const current = await fetch("/v1/sessions/current");
if (current.ok) show(await current.json());
else if (code !== null) signIn(code);
