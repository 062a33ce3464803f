{{/*
What Ray Serve is told. The application's args are a part of the settings' tree and go before the
environment; secrets are not among them, they come to the pods as environment.
*/}}
{{- define "stemroute.serveConfig" -}}
{{- $worker := .Values.worker -}}
{{- $more := 0 -}}
{{- range $worker.additionalGroups }}{{ $more = add $more .replicas }}{{ end -}}
proxy_location: Disabled
applications:
  - name: stemroute
    import_path: ops.serve_app:application
    route_prefix: null
    args:
      worker:
        model: {{ include "stemroute.modelPath" . | quote }}
        {{- with .Values.model.servedName }}
        served_name: {{ . | quote }}
        {{- end }}
        port: {{ $worker.port }}
        cache_dir: /var/cache/stemroute
        {{- with $worker.settings }}
        {{- include "stemroute.settings" . | trim | nindent 8 }}
        {{- end }}
      serve:
        replicas: {{ add $worker.replicas $more }}
        gpus_per_worker: {{ $worker.gpus }}
        cpus_per_worker: {{ $worker.cpus }}
        health_check_period_s: {{ $worker.healthCheck.periodSeconds }}
        health_check_timeout_s: {{ $worker.healthCheck.timeoutSeconds }}
    {{- with $worker.autoscaling }}
    {{- if .enabled }}
    deployments:
      - name: worker
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ add .minReplicas $more }}
          max_replicas: {{ add .maxReplicas $more }}
          upscale_delay_s: {{ .upscaleDelaySeconds }}
          downscale_delay_s: {{ .downscaleDelaySeconds }}
          policy:
            policy_function: ops.autoscaling:BatchSizePolicy
            policy_kwargs:
              target_batch_size: {{ .targetBatchSize }}
    {{- end }}
    {{- end }}
{{- end -}}
