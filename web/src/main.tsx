import { QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { queryClient } from "@/api/client";
import { openBy, takeAnswer, takeCode } from "@/api/session";
import { makeRouter } from "@/app/routes";
import { beginTheme } from "@/app/theme";
import "@/components/theme.css";

beginTheme();
// Before the router looks at the address. The frame waits for this call as for any session.
const brought = takeCode() ?? takeAnswer();
if (brought !== null) openBy(queryClient, brought);
const place = document.getElementById("page");
if (place === null) throw new Error("index.html has no #page.");
createRoot(place).render(
  <StrictMode>
    <QueryClientProvider client={queryClient}>
      <RouterProvider router={makeRouter()} />
    </QueryClientProvider>
  </StrictMode>,
);
