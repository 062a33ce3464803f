{{/*
One worker group of the Ray cluster. Takes root and group: the values of worker.*, with those of
an additional group laid over them. Ray is told to hold exactly one worker a pod, so that a fixed
port is free for it.
*/}}
{{- define "stemroute.workerGroup" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $worker := $root.Values.worker -}}
{{- $model := $root.Values.model -}}
{{- $modelVolume := include "stemroute.modelVolume" $root -}}
groupName: {{ $group.name }}
{{- if and .scales $worker.autoscaling.enabled }}
minReplicas: {{ $worker.autoscaling.minReplicas }}
maxReplicas: {{ $worker.autoscaling.maxReplicas }}
{{- else }}
replicas: {{ $group.replicas }}
minReplicas: {{ $group.replicas }}
maxReplicas: {{ max 1 $group.replicas }}
{{- end }}
rayStartParams:
  num-cpus: {{ ceil $worker.cpus | int64 | quote }}
  num-gpus: {{ $worker.gpus | int64 | quote }}
template:
  metadata:
    labels:
      {{- include "stemroute.podLabels" (dict "root" $root "component" "worker") | nindent 6 }}
      {{- with $group.podLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with $group.podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    enableServiceLinks: false
    serviceAccountName: {{ include "stemroute.serviceAccountName" $root }}
    automountServiceAccountToken: false
    {{- with $root.Values.imagePullSecrets }}
    imagePullSecrets:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $group.runtimeClassName }}
    runtimeClassName: {{ . }}
    {{- end }}
    {{- with $group.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    {{- with $group.nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $group.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $group.affinity }}
    affinity:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $group.topologySpreadConstraints }}
    topologySpreadConstraints:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    terminationGracePeriodSeconds: {{ $worker.terminationGracePeriodSeconds }}
    securityContext:
      {{- toYaml $worker.podSecurityContext | nindent 6 }}
    {{- if or $model.huggingface.repo $worker.initContainers }}
    initContainers:
      {{- if $model.huggingface.repo }}
      - name: download-model
        image: {{ include "stemroute.image" (dict "root" $root "image" $root.Values.ray.image) }}
        imagePullPolicy: {{ include "stemroute.pullPolicy" (dict "root" $root "image" $root.Values.ray.image) }}
        command: [hf, download]
        args:
          - {{ $model.huggingface.repo | quote }}
          - --revision
          - {{ $model.huggingface.revision | quote }}
          - --local-dir
          - {{ include "stemroute.modelPath" $root | quote }}
        env:
          - name: HF_HOME
            value: /tmp/huggingface
          {{- with $model.huggingface.tokenSecret }}
          - name: HF_TOKEN
            valueFrom:
              secretKeyRef:
                name: {{ . }}
                key: {{ $model.huggingface.tokenKey }}
          {{- end }}
          {{- with $group.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        {{- with $worker.envFrom }}
        envFrom:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        resources:
          requests: {cpu: "1", memory: 2Gi}
          limits: {memory: 4Gi}
        securityContext:
          {{- toYaml $worker.securityContext | nindent 10 }}
        volumeMounts:
          - name: model
            mountPath: {{ $model.volume.mountPath }}
      {{- end }}
      {{- with $worker.initContainers }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    containers:
      - name: ray-worker
        image: {{ include "stemroute.image" (dict "root" $root "image" $root.Values.ray.image) }}
        imagePullPolicy: {{ include "stemroute.pullPolicy" (dict "root" $root "image" $root.Values.ray.image) }}
        env:
          {{- include "stemroute.commonEnv" $root | nindent 10 }}
          - name: STEMROUTE_WORKER_HOST
            value: 0.0.0.0
          - name: STEMROUTE_WORKER_ADVERTISE_HOST
            valueFrom:
              fieldRef:
                fieldPath: status.podIP
          - name: RAY_USAGE_STATS_ENABLED
            value: {{ ternary "1" "0" $root.Values.ray.usageStats | quote }}
          {{- with $group.env }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        {{- with $worker.envFrom }}
        envFrom:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        ports:
          - name: worker
            containerPort: {{ $worker.port }}
        {{- with $worker.startupProbe }}
        startupProbe:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with $worker.livenessProbe }}
        livenessProbe:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        readinessProbe:
          {{- toYaml $worker.readinessProbe | nindent 10 }}
        resources:
          {{- $resources := deepCopy $group.resources }}
          {{- if gt (int $worker.gpus) 0 }}
          {{- $gpus := dict $group.gpuResource (int64 $worker.gpus) }}
          {{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) }}
          {{- $_ := set $resources "requests" (merge (deepCopy $gpus) (default dict $resources.requests)) }}
          {{- end }}
          {{- toYaml $resources | nindent 10 }}
        securityContext:
          {{- toYaml $worker.securityContext | nindent 10 }}
        volumeMounts:
          - name: shared-mem
            mountPath: /dev/shm
          - name: cache
            mountPath: /var/cache/stemroute
          {{- if $modelVolume }}
          - name: model
            mountPath: {{ $model.volume.mountPath }}
            readOnly: true
          {{- end }}
          {{- with $worker.extraVolumeMounts }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    volumes:
      - name: shared-mem
        emptyDir:
          medium: Memory
          sizeLimit: {{ $group.shmSize }}
      - name: cache
        {{- toYaml $worker.cacheVolume | nindent 8 }}
      {{- if $modelVolume }}
      - name: model
        {{- $modelVolume | nindent 8 }}
      {{- end }}
      {{- with $worker.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}
