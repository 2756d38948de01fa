// What a browser loads before Overview is there: the page, the scripts and styles that it asks for, and those of the
// Overview screen. Prints the gzipped size, and fails above the limit.
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const LIMIT_KB = 250;
const built = join(dirname(fileURLToPath(import.meta.url)), "../../service/holdfast_service/ui/static");
const manifest = JSON.parse(readFileSync(join(built, ".vite/manifest.json"), "utf8"));

const files = new Set(["index.html"]);
function add(name) {
  const chunk = manifest[name];
  if (files.has(chunk.file)) return;
  files.add(chunk.file);
  for (const style of chunk.css ?? []) files.add(style);
  for (const each of chunk.imports ?? []) add(each);
}
add("index.html");
add("src/overview/OverviewScreen.tsx");

const bytes = [...files].reduce((sum, file) => sum + gzipSync(readFileSync(join(built, file))).length, 0);
const kb = bytes / 1000;
console.log(`initial load: ${kb.toFixed(1)} KB gzipped in ${files.size} files (at most ${LIMIT_KB} KB)`);
if (kb > LIMIT_KB) {
  console.error("It is too much. Load what Overview does not show with its own route: lazyRouteComponent.");
  process.exit(1);
}
