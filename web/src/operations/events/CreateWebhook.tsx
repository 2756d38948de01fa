import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import styles from "../Operations.module.css";
import type { EventType } from "../route";
import { EventTypes } from "./EventTypes";

type WebhookFormat = Schemas["WebhookFormat"];

/** Each format once; one that is missing is an error of the compiler. */
const FORMATS: Record<WebhookFormat, string> = {
  standard: "standard: a program of your own, with signed calls",
  slack: "slack: an incoming webhook of Slack",
  pagerduty: "pagerduty: an integration key",
  alertmanager: "alertmanager: its /api/v2/alerts",
};

/** Chosen at first: what needs an action of an operator, and that it is over. */
const USUAL: EventType[] = [
  ...(["attempt.lost", "attempt.revived", "run.stalled", "run.goes_on"] as const),
  ...(["checkpoint.corrupt", "drill.failed", "store.unavailable", "store.available"] as const),
];

interface CreateWebhookProps {
  project: string;
  onCreated: (webhook: Schemas["WebhookCreated"]) => void;
  onClose: () => void;
}

export function CreateWebhook({ project, onCreated, onClose }: CreateWebhookProps) {
  const [format, setFormat] = useState<WebhookFormat>("standard");
  const [url, setUrl] = useState("");
  const [routingKey, setRoutingKey] = useState("");
  const [events, setEvents] = useState(USUAL);
  const post = useOnce((body: Schemas["CreateWebhook"], key) =>
    api.POST("/v1/projects/{project}/webhooks", {
      params: { path: { project }, header: { "idempotency-key": key } },
      body,
    }),
  );

  async function create() {
    const { data } = await post({
      url: url.trim(),
      events,
      format,
      ...(format === "pagerduty" ? { routing_key: routingKey.trim() } : {}),
    });
    if (data) onCreated(data);
  }

  return (
    <ConfirmDialog title={`A new webhook of ${project}`} action="Make the webhook" onConfirm={create} onClose={onClose}>
      <div className={styles.fields}>
        <label className={styles.field}>
          Format
          <select value={format} onChange={(event) => setFormat(event.target.value as WebhookFormat)}>
            {Object.entries(FORMATS).map(([name, words]) => (
              <option key={name} value={name}>
                {words}
              </option>
            ))}
          </select>
        </label>
        <label className={styles.field}>
          URL
          <input
            type="url"
            required
            maxLength={2000}
            placeholder="https://alerts.example/holdfast"
            autoComplete="off"
            value={url}
            onChange={(event) => setUrl(event.target.value)}
          />
          <small>https. The service calls no address that is not public, unless it was started to.</small>
        </label>
        {format === "pagerduty" && (
          <label className={styles.field}>
            Integration key
            <input
              type="password"
              required
              pattern="[0-9A-Za-z]{8,64}"
              title="8 to 64 letters and digits"
              autoComplete="off"
              value={routingKey}
              onChange={(event) => setRoutingKey(event.target.value)}
            />
          </label>
        )}
        <fieldset>
          <legend>Events</legend>
          <EventTypes chosen={events} onChange={setEvents} required />
        </fieldset>
      </div>
    </ConfirmDialog>
  );
}
