{{- define "chunkweave.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "chunkweave.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "chunkweave.valkeySelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-valkey
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: shared-segments
{{- end -}}

{{- define "chunkweave.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "chunkweave.image" -}}
{{- $usual := ternary "chunkweave-vllm" "chunkweave" (eq .Values.backend "vllm") -}}
{{- printf "%s:%s" (.Values.image.repository | default $usual) (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- /* The file that `--config` takes: what the values say, and where the shared segments are. */ -}}
{{- define "chunkweave.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- if and .Values.valkey.enabled (not (hasKey $settings "remote_url")) -}}
{{- $_ := set $settings "remote_url" (printf "redis://%s-valkey:6379/0" (include "chunkweave.name" .)) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}
