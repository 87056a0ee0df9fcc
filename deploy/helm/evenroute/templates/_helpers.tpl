{{- define "evenroute.name" -}}
{{- if contains "evenroute" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-evenroute{{ end }}
{{- end }}

{{- define "evenroute.selector" -}}
app.kubernetes.io/name: evenroute
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: rebalancer
{{- end }}

{{- define "evenroute.labels" -}}
{{ include "evenroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
