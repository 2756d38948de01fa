import "@testing-library/jest-dom/vitest";
import { configure } from "@testing-library/react";

// A busy machine takes its time, above all for the first screen, whose modules are loaded by its route.
configure({ asyncUtilTimeout: 90_000 });
vi.setConfig({ testTimeout: 300_000 });

// What jsdom lacks and every browser has. Sizes: a table of 600 px, so that it has rows in sight.
HTMLDialogElement.prototype.showModal = function showModal() {
  this.open = true;
};
HTMLDialogElement.prototype.close = function close() {
  this.open = false;
};
Object.defineProperty(Element.prototype, "clientHeight", { get: () => 600 });
Object.defineProperty(Element.prototype, "clientWidth", { get: () => 900 });
Element.prototype.scrollTo = function scrollTo(this: Element, options?: ScrollToOptions | number) {
  if (typeof options === "object") this.scrollTop = options.top ?? 0;
  this.dispatchEvent(new Event("scroll"));
} as typeof Element.prototype.scrollTo;
window.scrollTo = () => undefined;
Element.prototype.scrollIntoView = () => undefined;
globalThis.ResizeObserver = class {
  observe() {}
  unobserve() {}
  disconnect() {}
};
window.matchMedia = (query: string) =>
  Object.assign(new EventTarget(), { matches: false, media: query }) as unknown as MediaQueryList;
