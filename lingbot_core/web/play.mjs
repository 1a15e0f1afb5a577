// The page of `lingbot-world play`: the live element and nothing else.

import { createLive } from "./live.mjs";

const address = new URL("/v1/live", location.href);
address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
const live = createLive({ address, language: navigator.language });
document.getElementById("here").replaceChildren(live.element);
live.element.querySelector(".lbw-stage").focus();
