import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { EventTypes } from "./EventTypes";
import styles from "./Operations.module.css";
import { newKey } from "./parts";
import type { EventType } from "./route";

type WebhookFormat = Schemas["WebhookFormat"];

/** Each format once; one that is missing is an error of the compiler. */
const FORMATS: Record<WebhookFormat, string> = {
  standard: "standard: a program of your own, with signed calls",
  slack: "slack: an incoming webhook of Slack",
  pagerduty: "pagerduty: an integration key",
  alertmanager: "alertmanager: its /api/v2/alerts",
};

/** What most want to be called about: where somebody has to do something. */
const USUAL: EventType[] = ["attempt.lost", "run.stalled", "checkpoint.corrupt", "drill.failed", "store.unavailable"];

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
  // The same for each try of this dialog: a call whose reply was lost makes no second webhook.
  const [key] = useState(newKey);

  async function create() {
    const body = {
      url: url.trim(),
      events,
      format,
      ...(format === "pagerduty" ? { routing_key: routingKey.trim() } : {}),
    };
    const { data } = await api.POST("/v1/projects/{project}/webhooks", {
      params: { path: { project }, header: { "idempotency-key": key } },
      body,
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
