// Exchanges a key or a token for a session.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { post } from "../api.js";
import { Field } from "../components/basics.js";
import { store } from "../store.js";
import { T } from "../text.js";

export function Login({ onDone }) {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(store.expired ? T.login.expired : store.session.user ? T.login.unable : "");
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("/api/session", { token });
      await store.readSession();
      store.expired = false;
      if (store.session.read) onDone();
      else setProblem(T.login.unable);
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<main class="login"><form onSubmit=${submit} class="panel">
    <h1>${T.app}</h1><p class="hint">${store.session.policy ? T.login.hintPolicy : T.login.hint}</p>
    <${Field} label=${store.session.policy ? T.login.key : T.login.token}><input type="password" autocomplete="current-password" required autofocus value=${token} onInput=${(event) => setToken(event.target.value)} /><//>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <button class="primary">${T.login.submit}</button>
  </form></main>`;
}
