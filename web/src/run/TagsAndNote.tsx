import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { useChanged } from "@/checkpoint/edit/changes";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { changesOf, editedWords } from "@/format/changes";
import { Tags } from "@/runs/Tags";
import styles from "./RunScreen.module.css";

type RunView = Schemas["RunView"];

/** What people say of a run, for finding it again. */
export function TagsAndNote({ run }: { run: RunView }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <>
      <div className="row">
        <span>
          <span className="quiet">Tags</span> <Tags project={run.project} tags={run.tags} />
        </span>
        <Can scope="operate" reason={run.in_trash ? "It is in the trash. Take it back first." : undefined}>
          <button type="button" onClick={() => setOpen(true)} aria-label="Edit the tags and the note">
            Edit
          </button>
        </Can>
      </div>
      {run.note && <p className={styles.note}>{run.note}</p>}
      {isOpen && <EditTagsAndNote run={run} onClose={() => setOpen(false)} />}
    </>
  );
}

/** Edits the version that was there when the dialog was opened. If somebody else was faster, it says what has changed. */
function EditTagsAndNote({ run, onClose }: { run: RunView; onClose: () => void }) {
  const [opened] = useState(run);
  const [seen, setSeen] = useState(run);
  const [tags, setTags] = useState(textOf(run));
  const [note, setNote] = useState(run.note);
  const changed = useChanged();
  const path = { project: run.project, run: run.name };

  async function save() {
    await api.PATCH("/v1/projects/{project}/runs/{run}", {
      params: { path, header: { "if-match": seen.etag } },
      // What this person left alone stays as another one may have made it.
      body: {
        ...(tags !== textOf(opened) && { tags: editedWords(opened.tags ?? [], tags, seen.tags ?? []) }),
        ...(note !== opened.note && { note: note.trim() }),
      },
    });
    await changed();
  }

  async function conflict() {
    const { data: now } = await api.GET("/v1/projects/{project}/runs/{run}", { params: { path } });
    if (now === undefined) throw new Error("The service gave no run.");
    return { changes: changesOf(editedOf(seen), editedOf(now), { lists: true }), reload: () => setSeen(now) };
  }

  return (
    <ConfirmDialog
      title={`Tags and note of ${run.name}`}
      action="Save"
      onConfirm={save}
      onConflict={conflict}
      onClose={onClose}
    >
      <p>
        <label htmlFor="tags">Tags, with spaces between them</label>
        <br />
        <input
          id="tags"
          className={styles.wide}
          value={tags}
          onChange={(event) => setTags(event.target.value)}
          placeholder="baseline paper"
          autoComplete="off"
        />
      </p>
      <p>
        <label htmlFor="note">Note</label>
        <br />
        <textarea
          id="note"
          className={styles.wide}
          rows={4}
          maxLength={4000}
          value={note}
          onChange={(event) => setNote(event.target.value)}
        />
      </p>
    </ConfirmDialog>
  );
}

function textOf({ tags }: RunView): string {
  return (tags ?? []).join(" ");
}

function editedOf({ tags, note }: RunView): Record<string, unknown> {
  return { tags: tags ?? [], note };
}
