{{- define "holdfast.name" -}}
{{- if contains "holdfast" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-holdfast" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "holdfast.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "holdfast.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "holdfast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What every pod has: the user of the image, and nothing that it could write but its folders. */}}
{{- define "holdfast.podSecurity" -}}
# A Service called `holdfast` would else give each pod HOLDFAST_PORT=tcp://…, which is a setting.
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 8400
  runAsGroup: 8400
  fsGroup: 8400
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where people and callers from outside reach it; nothing without an Ingress, unless the settings say it. */}}
{{- define "holdfast.publicUrl" -}}
{{- if hasKey .Values.settings "HOLDFAST_PUBLIC_URL" }}{{ .Values.settings.HOLDFAST_PUBLIC_URL }}
{{- else if .Values.ingress.enabled }}{{ ternary "https" "http" (ne .Values.ingress.tlsSecret "") }}://{{ required "ingress.host is the name that callers use" .Values.ingress.host }}
{{- end }}
{{- end }}

{{- define "holdfast.hasIdentityFile" -}}
{{- if and .Values.identity.config .Values.identity.existingConfigMap }}{{ fail "identity.config and identity.existingConfigMap are both set: one of them is the identity file" }}{{ end }}
{{- if or .Values.identity.config .Values.identity.existingConfigMap }}yes{{ end }}
{{- end }}

{{- define "holdfast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What only those pods need that answer callers. Settings of the same name come first. */}}
{{- define "holdfast.callersEnv" -}}
{{- if .Values.ingress.enabled }}
{{- if not (hasKey .Values.settings "HOLDFAST_PUBLIC_URL") }}
- {name: HOLDFAST_PUBLIC_URL, value: {{ include "holdfast.publicUrl" . | quote }}}
{{- end }}
{{- if not (hasKey .Values.settings "HOLDFAST_TRUSTED_PROXIES") }}
{{- if not .Values.ingress.trustedProxies }}{{ fail "ingress.trustedProxies names the addresses or networks of the ingress controller's pods: without it all callers are one address" }}{{ end }}
- {name: HOLDFAST_TRUSTED_PROXIES, value: {{ join "," .Values.ingress.trustedProxies | quote }}}
{{- end }}
{{- end }}
{{- if include "holdfast.hasIdentityFile" . }}
- {name: HOLDFAST_IDENTITY_FILE, value: /etc/holdfast/identity/identity.yaml}
{{- end }}
{{- end }}

{{/* All that the Job of migrations needs. */}}
{{- define "holdfast.databaseEnv" -}}
- name: HOLDFAST_DATABASE_URL
  valueFrom:
    secretKeyRef: {name: {{ required "database.existingSecret names the Secret with the URL of Postgres" .Values.database.existingSecret }}, key: {{ .Values.database.key }}}
- {name: HOLDFAST_LOG_FORMAT, value: json}
{{- end }}

{{- define "holdfast.env" -}}
{{ include "holdfast.databaseEnv" . }}
- {name: HOLDFAST_DATABASE_CONNECTIONS, value: {{ .Values.database.connections | quote }}}
- {name: HOLDFAST_STORE, value: {{ required "store.url names the bucket" .Values.store.url | quote }}}
{{- with .Values.store.second }}
- {name: HOLDFAST_SECOND_STORE, value: {{ . | quote }}}
{{- end }}
{{- with .Values.store.cold }}
- {name: HOLDFAST_COLD_STORE, value: {{ . | quote }}}
{{- end }}
{{- if .Values.secretsKey.existingSecret }}
- {name: HOLDFAST_SECRETS_KEY_FILE, value: /etc/holdfast/secrets/keys}
{{- end }}
{{- if .Values.migrations.enabled }}
# The Job has done it: see migrate.yaml.
- {name: HOLDFAST_MIGRATE_AT_START, value: "false"}
{{- end }}
{{- if .Values.bootstrapToken.existingSecret }}
- name: HOLDFAST_BOOTSTRAP_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.bootstrapToken.existingSecret }}, key: {{ .Values.bootstrapToken.key }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- define "holdfast.envFrom" -}}
{{- with .Values.store.credentialsSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{/* The data folder holds nothing that must outlive a pod with Postgres and a bucket. */}}
{{- define "holdfast.writableMounts" -}}
- {name: data, mountPath: /var/lib/holdfast}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "holdfast.mounts" -}}
{{ include "holdfast.writableMounts" . }}
{{- if .Values.secretsKey.existingSecret }}
- {name: secrets, mountPath: /etc/holdfast/secrets, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.writableVolumes" -}}
- name: data
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "holdfast.volumes" -}}
{{ include "holdfast.writableVolumes" . }}
{{- if .Values.secretsKey.existingSecret }}
- name: secrets
  secret:
    secretName: {{ .Values.secretsKey.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .Values.secretsKey.key }}, path: keys}]
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
