// Starts the console: session, stream, and the frame around the pages.

import { html, render, useEffect, useRef, useState } from "../vendor/preact-htm.module.js";
import { send } from "./api.js";
import { Stage, useStore } from "./components/basics.js";
import { Notices } from "./components/notices.js";
import { Login } from "./pages/login.js";
import { Logs } from "./pages/logs.js";
import { Models } from "./pages/models.js";
import { Overview } from "./pages/overview.js";
import { Settings } from "./pages/settings.js";
import { Traces } from "./pages/traces.js";
import { link, useRoute } from "./router.js";
import { store } from "./store.js";
import { T } from "./text.js";

const PAGES = ["overview", "models", "chat", "traces", "logs", "settings"];
const ICONS = {
  overview: "M2 9h5V2H2v7Zm0 5h5v-3H2v3Zm7 0h5V7H9v7Zm0-12v3h5V2H9Z",
  models: "M8 1 2 4.5v7L8 15l6-3.500v-7L8 1Zm0 2.300 3.600 2.100L8 7.500 4.400 5.400 8 3.300ZM4 7.100l3 1.750v3.200l-3-1.750V7.100Zm5 4.950v-3.200l3-1.750v3.200l-3 1.750Z",
  chat: "M2 2h12v9H7l-4 3v-3H2V2Zm2 2v5h1v1l1.500-1H12V4H4Z",
  traces: "M2 3h7v2H2V3Zm3 4h7v2H5V7Zm2 4h7v2H7v-2Z",
  logs: "M2 2h12v2H2V2Zm0 4h9v2H2V6Zm0 4h12v2H2v-2Zm0 4h6v1H2v-1Z",
  settings: "M7 1h2l.4 1.900 1.500.700 1.700-1 1.300 1.400-1 1.700.600 1.500L15 7.600v1.900l-1.900.400-.600 1.500 1 1.700-1.400 1.300-1.700-1-1.500.600L8.500 16h-1l-.400-1.900-1.500-.600-1.700 1-1.300-1.400 1-1.700L3 9.900 1 9.500V7.600l2-.300.600-1.500-1-1.700L4 2.700l1.700 1L7.200 3 7 1Zm1 4.500a3 3 0 1 0 0 6 3 3 0 0 0 0-6Z",
};

function Connection() {
  const [, again] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => store.connection === "lost" && again((n) => n + 1), 500);
    return () => clearInterval(timer);
  }, []);
  if (store.connection !== "lost") return null;
  const left = Math.max(Math.ceil((store.nextTry - Date.now()) / 1000), 0);
  return html`<div class="offline" role="status"><span>${store.refusal || T.connection.lostLong(left)}</span><button onClick=${() => store.wake && store.wake()}>${T.connection.retry}</button></div>`;
}

function Frame({ page, children }) {
  const about = store.about;
  const mark = store.connection === "live" ? "good" : store.connection === "lost" ? "bad" : "busy";
  const logOut = async () => {
    await send("DELETE", "/api/session");
    location.reload();
  };
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.querySelector("main h1")?.focus(); }}>${T.skip}</a>
    <header class="top">
      <a class="brand" href=${link()}><svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 1a7 7 0 1 0 7 7h-2a5 5 0 1 1-5-5 3.500 3.500 0 1 1-3.500 3.500h2A1.500 1.500 0 1 0 8 5a3 3 0 1 0 3 3h2a5 5 0 0 0-5-7Z" /></svg>${T.app}</a>
      <span class="server">${about ? html`${about.id} <span class="muted">${about.host}</span>` : ""}</span>
      <div class="spacer"></div>
      ${!store.may.control && !store.may.infer && store.session && html`<span class="badge">${T.readOnly}</span>`}
      <span class="state ${mark}" aria-live="polite"><i aria-hidden="true"></i>${T.connection[store.connection]}</span>
      <${Stage} state=${store.state} />
      ${store.session?.logged_in ? html`<button class="quiet" onClick=${logOut}>${T.login.out}</button>`
        : store.session?.tokens && html`<button class="quiet" onClick=${() => store.askLogin()}>${T.login.submit}</button>`}
    </header>
    <nav class="side" aria-label=${T.nav.label}>${PAGES.map((name) => html`<a key=${name} href=${name === "overview" ? link() : link(name)} aria-current=${page === name ? "page" : null}><svg viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>${T.nav[name]}</a>`)}</nav>
    <${Connection} />
    <main id="content">${children}</main>
    <${Notices} />`;
}

function App() {
  useStore();
  const [page = "overview", first = "", second = ""] = useRoute();
  const place = [page, first, second].join("/");
  const begun = useRef(false);
  useEffect(() => {
    const heading = document.querySelector("main h1");
    document.title = `${heading ? heading.textContent : T.nav[page] || T.app} · ${T.app}`;
    if (begun.current && heading && !document.querySelector("main .tabs :focus")) heading.focus({ preventScroll: true });
    begun.current = true;
  }, [place]);
  if (!store.session.read) return html`<${Login} onDone=${() => store.run()} />`;
  const content =
    page === "models" && first ? html`<${LazyPage} key=${first} read=${readModelPage} heading=${first} name=${first} tab=${second} />`
    : page === "models" ? html`<${Models} />`
    : page === "chat" ? html`<${LazyPage} key="chat" read=${readChat} heading=${T.chat.title} />`
    : page === "traces" ? html`<${Traces} chosen=${first} />`
    : page === "logs" ? html`<${Logs} />`
    : page === "settings" ? html`<${Settings} />`
    : html`<${Overview} />`;
  return html`<${Frame} page=${PAGES.includes(page) ? page : "overview"}>${content}<//>`;
}

const readModelPage = () => import("./pages/model.js").then((module) => module.ModelPage);
const readChat = () => import("./pages/chat.js").then((module) => module.Chat);

/** A page that is read when it is first opened: these have most of the code. */
function LazyPage({ read, heading, ...props }) {
  const [page, setPage] = useState(null);
  useEffect(() => {
    read().then((found) => setPage(() => found));
  }, []);
  return page ? html`<${page} ...${props} />` : html`<h1 tabindex="-1">${heading}</h1>`;
}

/** Reads the session, however often it takes, and shows the page. */
async function start() {
  for (;;) {
    try {
      await store.readSession();
      break;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  if (store.session.read) store.run();
  const place = document.getElementById("app");
  place.textContent = "";
  render(html`<${App} />`, place);
}

start();
