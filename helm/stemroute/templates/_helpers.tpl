{{- define "stemroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "stemroute.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Without versions: a new chart alone must not replace pods that hold GPUs and caches. */}}
{{- define "stemroute.podLabels" -}}
{{ include "stemroute.selectorLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "stemroute.labels" -}}
{{ include "stemroute.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stemroute.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "stemroute.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "stemroute.pool" -}}
{{- default (printf "%s-%s" .Release.Namespace (include "stemroute.fullname" .)) .Values.pool -}}
{{- end -}}

{{/* Image of a component: its own fields where set, else image.*. Takes root, image. */}}
{{- define "stemroute.image" -}}
{{- $shared := .root.Values.image -}}
{{- printf "%s:%s" (default $shared.repository .image.repository) (default (default .root.Chart.AppVersion $shared.tag) .image.tag) -}}
{{- end -}}

{{- define "stemroute.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy .image.pullPolicy -}}
{{- end -}}

{{/* env entry from a Secret: the user's where named, else the release's. Takes root, name, from (existingSecret, key), own (key in the release's Secret). */}}
{{- define "stemroute.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
{{- if .from.existingSecret }}
      name: {{ .from.existingSecret }}
      key: {{ .from.key }}
{{- else }}
      name: {{ include "stemroute.fullname" .root }}
      key: {{ .own }}
{{- end }}
{{- end -}}

{{/* Value of one key of the release's Secret: the given one, else the one there already, else a new one. Base64. */}}
{{- define "stemroute.secretData" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace (include "stemroute.fullname" .root) -}}
{{- if .value -}}
{{- .value | b64enc -}}
{{- else if and $there $there.data (hasKey $there.data .key) -}}
{{- index $there.data .key -}}
{{- else -}}
{{- randAlphaNum 40 | b64enc -}}
{{- end -}}
{{- end -}}

{{/* A number without the exponent that Helm gives to large ones; anything else as it is. */}}
{{- define "stemroute.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%d" (int64 .) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* A flat map of settings as YAML. */}}
{{- define "stemroute.settings" -}}
{{- range $key, $value := . }}
{{ $key }}: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ include "stemroute.scalar" $value }}{{ end }}
{{- end }}
{{- end -}}

{{/* A flat map of settings as environment. Takes section, settings. */}}
{{- define "stemroute.settingsEnv" -}}
{{- $section := .section -}}
{{- range $key, $value := .settings }}
- name: {{ printf "STEMROUTE_%s_%s" $section $key | upper }}
  value: {{ include "stemroute.scalar" $value | quote }}
{{- end }}
{{- end -}}

{{/* What workers and gateways must agree on. */}}
{{- define "stemroute.commonEnv" -}}
- name: STEMROUTE_POOL
  value: {{ include "stemroute.pool" . | quote }}
{{ include "stemroute.secretEnv" (dict "root" . "name" "STEMROUTE_SECRET" "from" .Values.poolSecret "own" "pool-secret") }}
{{- if .Values.valkey.enabled }}
{{ include "stemroute.secretEnv" (dict "root" . "name" "STEMROUTE_REDIS_PASSWORD" "from" .Values.valkey.auth "own" "valkey-password") }}
- name: STEMROUTE_REDIS_URL
  value: {{ printf "redis://%s-valkey:%v/0" (include "stemroute.fullname" .) .Values.valkey.port | quote }}
{{- else if .Values.externalRedis.url }}
{{- if .Values.externalRedis.existingSecret }}
{{ include "stemroute.secretEnv" (dict "root" . "name" "STEMROUTE_REDIS_PASSWORD" "from" (dict "existingSecret" .Values.externalRedis.existingSecret "key" .Values.externalRedis.passwordKey)) }}
{{- end }}
- name: STEMROUTE_REDIS_URL
  value: {{ .Values.externalRedis.url | quote }}
{{- else }}
- name: STEMROUTE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.externalRedis.existingSecret }}
      key: {{ .Values.externalRedis.urlKey }}
{{- end }}
{{- include "stemroute.settingsEnv" (dict "section" "BUS" "settings" .Values.bus) }}
{{- end -}}

{{/* Address of the Redis in which Ray keeps its state; "" where none is given and the release's is not a single server. */}}
{{- define "stemroute.gcsRedis" -}}
{{- $url := .Values.externalRedis.url -}}
{{- if .Values.ray.gcsFaultTolerance.redisAddress -}}
{{- .Values.ray.gcsFaultTolerance.redisAddress -}}
{{- else if .Values.valkey.enabled -}}
{{- printf "redis://%s-valkey:%v" (include "stemroute.fullname" .) .Values.valkey.port -}}
{{- else if regexMatch "^rediss?://[^,]+$" $url -}}
{{- $host := (urlParse $url).host -}}
{{- printf "%s://%s%s" (urlParse $url).scheme $host (contains ":" $host | ternary "" ":6379") -}}
{{- end -}}
{{- end -}}

{{/* gcsFaultToleranceOptions of the Ray cluster. Without externalStorageNamespace KubeRay takes the cluster's id, so that the second cluster of an update has its own. */}}
{{- define "stemroute.gcsFaultTolerance" -}}
{{- $redis := .Values.externalRedis -}}
redisAddress: {{ include "stemroute.gcsRedis" . | quote }}
{{- if .Values.valkey.enabled }}
redisPassword:
{{- pick (include "stemroute.secretEnv" (dict "root" . "name" "" "from" .Values.valkey.auth "own" "valkey-password") | fromYamlArray | first) "valueFrom" | toYaml | nindent 2 }}
{{- else }}
{{- with (urlParse (default "redis://" $redis.url)).userinfo | trimSuffix ":" }}
redisUsername:
  value: {{ . | quote }}
{{- end }}
{{- if $redis.existingSecret }}
redisPassword:
  valueFrom:
    secretKeyRef:
      name: {{ $redis.existingSecret }}
      key: {{ $redis.passwordKey }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Path of the model in a worker's pod. */}}
{{- define "stemroute.modelPath" -}}
{{- if .Values.model.huggingface.repo -}}
{{- printf "%s/%s" .Values.model.volume.mountPath .Values.model.huggingface.repo -}}
{{- else -}}
{{- .Values.model.path -}}
{{- end -}}
{{- end -}}

{{/* Volume source of the model, "" where none is needed. */}}
{{- define "stemroute.modelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- if $volume.existingClaim -}}
persistentVolumeClaim:
  claimName: {{ $volume.existingClaim }}
{{- else if $volume.create.enabled -}}
persistentVolumeClaim:
  claimName: {{ include "stemroute.fullname" . }}-model
{{- else if $volume.source -}}
{{- toYaml $volume.source -}}
{{- else if .Values.model.huggingface.repo -}}
emptyDir: {}
{{- end -}}
{{- end -}}

{{/* Combinations of values that cannot work, each with what to change. */}}
{{- define "stemroute.check" -}}
{{- $redis := .Values.externalRedis -}}
{{- if .Values.valkey.enabled -}}
{{- if or $redis.url $redis.existingSecret -}}
{{- fail "externalRedis is set, but valkey.enabled is true as well: set valkey.enabled=false to use the external Redis" -}}
{{- end -}}
{{- if contains "\n" .Values.valkey.auth.value -}}
{{- fail "valkey.auth.value contains a line break: use a password without" -}}
{{- end -}}
{{- else -}}
{{- if not (or $redis.url $redis.existingSecret) -}}
{{- fail "valkey.enabled is false: set externalRedis.url, or externalRedis.existingSecret with the URL under its key externalRedis.urlKey" -}}
{{- end -}}
{{- if regexMatch "^[a-z+]+://[^/@]*:[^/]*@" $redis.url -}}
{{- fail "externalRedis.url holds a password, which everyone who can read pods would see: put it into a Secret, and name that in externalRedis.existingSecret" -}}
{{- end -}}
{{- end -}}
{{- if .Values.ray.gcsFaultTolerance.enabled -}}
{{- if and .Values.valkey.enabled (not .Values.valkey.persistence.enabled) -}}
{{- fail "ray.gcsFaultTolerance.enabled needs a Redis that keeps its data: set valkey.persistence.enabled=true, or use an external Redis" -}}
{{- end -}}
{{- if not (include "stemroute.gcsRedis" .) -}}
{{- fail "ray.gcsFaultTolerance: Ray reaches one Redis server at HOST:PORT, which is not to be seen in externalRedis.url: set ray.gcsFaultTolerance.redisAddress" -}}
{{- end -}}
{{- end -}}
{{- $volumes := 0 -}}
{{- if .Values.model.volume.existingClaim }}{{ $volumes = add $volumes 1 }}{{ end -}}
{{- if .Values.model.volume.create.enabled }}{{ $volumes = add $volumes 1 }}{{ end -}}
{{- if .Values.model.volume.source }}{{ $volumes = add $volumes 1 }}{{ end -}}
{{- if gt (int $volumes) 1 -}}
{{- fail "model.volume: set only one of existingClaim, create.enabled and source" -}}
{{- end -}}
{{- if gt (int .Values.worker.autoscaling.minReplicas) (int .Values.worker.autoscaling.maxReplicas) -}}
{{- fail "worker.autoscaling.minReplicas is greater than maxReplicas" -}}
{{- end -}}
{{- $names := list "workers" -}}
{{- range .Values.worker.additionalGroups -}}
{{- if has .name $names -}}
{{- fail (printf "worker.additionalGroups: the name %s is taken; the first group is named workers" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.hosts) -}}
{{- fail "gateway.ingress.enabled is true, but gateway.ingress.hosts is empty" -}}
{{- end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled is true, but gateway.httpRoute.parentRefs is empty" -}}
{{- end -}}
{{- end -}}
