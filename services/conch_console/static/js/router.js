// Pages by the part of the address behind "#".

import { useEffect, useState } from "../vendor/preact-htm.module.js";

/** The parts of an address such as "#/models/name/try". */
export function parseRoute(hash) {
  return hash.replace(/^#?\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

/** The address of a page. */
export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export function useRoute() {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const take = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", take);
    return () => removeEventListener("hashchange", take);
  }, []);
  return route;
}
