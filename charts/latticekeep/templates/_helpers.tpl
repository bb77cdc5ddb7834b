{{- /* Labels and annotations of an object: (list $ component annotations labels). The component is empty for objects of all programs. Annotations
and labels are the object's own, and may be left out. */}}
{{- define "latticekeep.metadata" -}}
{{- $ := index . 0 -}}
{{- $annotations := dict -}}
{{- $labels := dict -}}
{{- if gt (len .) 2 }}{{ $annotations = index . 2 | default dict }}{{ end -}}
{{- if gt (len .) 3 }}{{ $labels = index . 3 | default dict }}{{ end -}}
labels:
{{- with index . 1 }}
  {{- include "latticekeep.selector" . | nindent 2 }}
{{- else }}
  app.kubernetes.io/name: latticekeep
{{- end }}
  app.kubernetes.io/instance: {{ $.Release.Name }}
  app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" }}
  {{- with merge dict $labels ($.Values.commonLabels | default dict) }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with merge dict $annotations ($.Values.commonAnnotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Labels and annotations of a pod: (list $ component annotations). Pods of hooks and tests have podLabels and podAnnotations of the server. */}}
{{- define "latticekeep.podMetadata" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $annotations := dict -}}
{{- if gt (len .) 2 }}{{ $annotations = index . 2 }}{{ end -}}
{{- with ternary $.Values.webhook $.Values.server (eq $component "webhook") -}}
{{- include "latticekeep.metadata" (list $ $component (merge dict $annotations (.podAnnotations | default dict)) .podLabels) -}}
{{- end -}}
{{- end }}

{{- /* The name of the ServiceAccount of (list $ component), server or webhook. */}}
{{- define "latticekeep.serviceAccount" -}}
{{- $component := index . 1 -}}
{{- with index . 0 -}}
{{- if eq $component "webhook" -}}
{{ .Values.webhook.serviceAccount.name | default "latticekeep-webhook" }}
{{- else -}}
{{ .Values.server.serviceAccount.name | default "latticekeep" }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Labels that select the pods of a component, which is the argument. They never change: selectors are immutable. */}}
{{- define "latticekeep.selector" -}}
app.kubernetes.io/name: latticekeep
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "latticekeep.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What every pod has. */}}
{{- define "latticekeep.podSecurity" -}}
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "latticekeep.container" -}}
image: {{ include "latticekeep.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
{{- end }}

{{- /* Where a pod runs, and what it resolves names with; the argument is the values of its component. */}}
{{- define "latticekeep.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .hostNetwork }}
hostNetwork: true
{{- end }}
{{- /* On the node's network a pod would otherwise ask the node's name servers, which know no Services. */}}
{{- with .dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" (default false .hostNetwork)) }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .dnsConfig }}
dnsConfig: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .hostAliases }}
hostAliases: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The constraints by which the pods of (list $ component) spread, unless their affinity says where they run. */}}
{{- define "latticekeep.spread" -}}
{{- $component := index . 1 -}}
{{- with get (index . 0).Values $component -}}
{{- if or .topologySpreadConstraints (not .affinity) -}}
topologySpreadConstraints:
{{- with .topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "latticekeep.selector" $component | nindent 8 }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The volume of a pod for (list name storage), unless the StatefulSet makes a claim for it. */}}
{{- define "latticekeep.volume" -}}
{{- $name := index . 0 -}}
{{- with index . 1 -}}
{{- if .existingClaim }}
- name: {{ $name }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}}
{{- else if .hostPath }}
- name: {{ $name }}
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- end }}

{{- /* The claim that the StatefulSet makes for (list name storage), unless there is a volume. */}}
{{- define "latticekeep.claim" -}}
{{- $name := index . 0 -}}
{{- with index . 1 -}}
{{- if not (or .existingClaim .hostPath) }}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: {{ $name }}
    labels: {{- include "latticekeep.selector" "server" | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .size }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "latticekeep.url" -}}
https://latticekeep.{{ .Release.Namespace }}.svc:8200
{{- end }}

{{- /* Whether the replicas share a database: then there may be several, and none has a volume. */}}
{{- define "latticekeep.shared" -}}
{{- with dig "store" "url" "" .Values.config }}true{{ end -}}
{{- end }}

{{- /* The settings of the program: what the chart decides goes before what the values say. */}}
{{- define "latticekeep.config" -}}
{{- $own := dict
      "listen" ":8200"
      "publicURL" (.Values.config.publicURL | default (include "latticekeep.url" .))
      "systemKeySecret" "latticekeep-system-key"
      "operations" (dict "listen" ":8201")
      "kubernetes" (dict "namespace" .Release.Namespace "webhook" .Values.webhook.enabled)
      "tls" (ternary
        (dict "certFile" "/etc/latticekeep/tls/tls.crt" "keyFile" "/etc/latticekeep/tls/tls.key")
        (dict "secretName" "latticekeep-tls") .Values.certManager.enabled)
-}}
{{- if not (include "latticekeep.shared" .) -}}
{{- $_ := set $own "dataDir" "/var/lib/latticekeep" -}}
{{- end -}}
{{- $kms := dict -}}
{{- if not (dig "kms" "url" "" .Values.config) -}}
{{- $_ := set $kms "url" (ternary "file:///etc/latticekeep/kms/kms.key" "file:///var/lib/latticekeep-kms/kms.key" (not (empty .Values.kms.existingSecret))) -}}
{{- end -}}
{{- if .Values.kms.tokenSecret -}}
{{- $_ := set $kms "tokenFile" "/etc/latticekeep/kms-token/token" -}}
{{- end -}}
{{- if $kms -}}
{{- $_ := set $own "kms" $kms -}}
{{- end -}}
{{- if .Values.postgres.existingSecret -}}
{{- $_ := set $own "store" (dict "passwordFile" (printf "/etc/latticekeep/postgres/%s" .Values.postgres.existingSecretKey)) -}}
{{- end -}}
{{- if .Values.mail.existingSecret -}}
{{- $_ := set $own "mail" (dict "smtp" (dict "passwordFile" "/etc/latticekeep/mail/password")) -}}
{{- end -}}
{{- if .Values.catalogues.existingConfigMap -}}
{{- $_ := set $own "compliance" (dict "catalogues" "/etc/latticekeep/catalogues") -}}
{{- end -}}
{{- if include "latticekeep.scratch" . -}}
{{- $_ := set $own "backup" (dict "scratch" "/var/lib/latticekeep-scratch") -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end }}

{{- /* Says whether the server needs a volume to verify its backups: the embedded store has one. */}}
{{- define "latticekeep.scratch" -}}
{{- if and (include "latticekeep.shared" .) (dig "backup" "bucket" "" .Values.config) }}true{{ end -}}
{{- end }}

{{- /* What both pods may connect to. */}}
{{- define "latticekeep.egress" -}}
{{- with .Values.networkPolicy.egress }}
{{- if .enabled }}
egress:
  - ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  - ports: [{port: 443}, {port: 6443}]
    {{- with .apiServer }}
    to: {{- toYaml . | nindent 6 }}
    {{- end }}
  - ports: [{port: 8200}]
    to:
      - podSelector:
          matchLabels: {{- include "latticekeep.selector" "server" | nindent 12 }}
  {{- with .rules }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* How many servers there are when none is missing. */}}
{{- define "latticekeep.leastReplicas" -}}
{{ ternary .Values.autoscaling.minReplicas .Values.replicas .Values.autoscaling.enabled }}
{{- end }}

{{- /* How the metrics are read; the argument is the values of a monitor. */}}
{{- define "latticekeep.scrape" -}}
port: operations
path: /metrics
interval: {{ .interval }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
# A credential's metric names its namespace, which the scrape must not replace by that of the server.
honorLabels: true
{{- with .relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
