import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

const service = process.env.HOLDFAST_URL ?? "http://127.0.0.1:8400";

export default defineConfig({
  base: "/ui/",
  plugins: [react()],
  resolve: { alias: { "@": "/src" } },
  build: {
    outDir: "../service/holdfast_service/ui/static",
    emptyOutDir: true,
    manifest: true,
    target: "es2022",
    // The page's policy (CSP) is `default-src 'self'`: what Vite would write into the page as data: must be a file.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  server: { host: "127.0.0.1", port: 8401, strictPort: true, proxy: { "/v1": { target: service } } },
  test: {
    environment: "jsdom",
    environmentOptions: { jsdom: { url: "http://127.0.0.1:8400/ui/" } },
    setupFiles: ["src/testing/setup.ts"],
    globals: true,
    // A file at a time: beside the other tests of a gate, several would wait for each other.
    maxWorkers: 1,
    css: { modules: { classNameStrategy: "non-scoped" } },
  },
});
