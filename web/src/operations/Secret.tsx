import type { ReactNode } from "react";
import { CopyCommand } from "@/components/CopyCommand";
import { Details } from "./parts";

interface SecretProps {
  title: string;
  secret: string;
  /** Whose it is. */
  name: string;
  children: ReactNode;
  onClose: () => void;
}

/** A secret that the service shows once. It is in this dialog and nowhere else in the page. */
export function Secret({ title, secret, name, children, onClose }: SecretProps) {
  return (
    <Details title={title} close="I have copied it" keeps onClose={onClose}>
      {children}
      <CopyCommand command={secret} label={`the secret of ${name}`} />
      <p>
        <strong>It is shown once.</strong> The service cannot show it again.
      </p>
    </Details>
  );
}
