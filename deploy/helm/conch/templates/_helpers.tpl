{{/* A name of at most 46 characters: pods append hashes of 17, and names of pods are cut at 63. */}}
{{- define "conch.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 46 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 46 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "conch.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "conch.labels" -}}
{{ include "conch.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "conch.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "conch.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* "true" if pods are added and removed by load. */}}
{{- define "conch.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{/* Refuses values that each are right and together are wrong; values.schema.json checks the others. */}}
{{- define "conch.check" -}}
{{- $from := .Values.modelRepository -}}
{{- $given := list -}}
{{- if $from.pvc.claimName }}{{ $given = append $given "modelRepository.pvc.claimName" }}{{ end -}}
{{- if $from.objectStore.urls }}{{ $given = append $given "modelRepository.objectStore.urls" }}{{ end -}}
{{- if $from.initContainer.image }}{{ $given = append $given "modelRepository.initContainer.image" }}{{ end -}}
{{- if not $given -}}
{{- fail "there is no source of models: set one of modelRepository.pvc.claimName, modelRepository.objectStore.urls and modelRepository.initContainer.image" -}}
{{- else if gt (len $given) 1 -}}
{{- fail (printf "%s are both set: the models come from one of them" (join " and " $given)) -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .hpa.enabled .keda.enabled -}}
{{- fail "autoscaling.hpa.enabled and autoscaling.keda.enabled are both true: KEDA makes an HPA of its own, and two would fight over the replicas; turn one off" -}}
{{- end -}}
{{- if gt (int64 .minReplicas) (int64 .maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas (%d) is more than autoscaling.maxReplicas (%d)" (int64 .minReplicas) (int64 .maxReplicas)) -}}
{{- end -}}
{{- if and .keda.enabled (not .keda.prometheusAddress) -}}
{{- fail "autoscaling.keda.prometheusAddress is empty: KEDA asks Prometheus there, such as http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.requireClientCertificates (not .Values.tls.secretName) -}}
{{- fail "tls.requireClientCertificates needs tls.secretName, a secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and .Values.service.headless (ne .Values.service.type "ClusterIP") -}}
{{- fail (printf "service.headless needs service.type ClusterIP, not %s" .Values.service.type) -}}
{{- end -}}
{{- $own := splitList " " "model-repository model-store allow-grpc grpc-address grpc-port allow-http http-address http-port allow-metrics metrics-address metrics-port metrics-use-ssl drain-delay exit-timeout-secs front-ends grpc-max-connection-age grpc-max-connection-age-grace grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert http-use-ssl http-server-cert http-server-key http-root-cert access-policy tls-cert tls-key tls-client-ca" -}}
{{- range $name := keys .Values.settings | sortAlpha -}}
{{- if has $name $own -}}
{{- fail (printf "settings.%s: the chart sets this flag from other values, which probes and ports depend on; see its README" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A value of --flag=value; numbers are floats here, and print large integers with an exponent. */}}
{{- define "conch.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* The flags of conch serve, a list in YAML. */}}
{{- define "conch.args" -}}
{{- range .Values.modelRepository.objectStore.urls }}
- {{ printf "--model-repository=%s" . | quote }}
{{- else }}
- --model-repository=/models
{{- end }}
- --drain-delay={{ int64 .Values.drain.delaySeconds }}
- --exit-timeout-secs={{ int64 .Values.drain.exitTimeoutSeconds }}
- --front-ends={{ include "conch.text" .Values.grpc.frontEnds }}
- --grpc-max-connection-age={{ mul .Values.grpc.maxConnectionAgeSeconds 1000 }}
- --grpc-max-connection-age-grace={{ mul .Values.grpc.maxConnectionAgeGraceSeconds 1000 }}
{{- if not .Values.http.enabled }}
- --allow-http=false
{{- end }}
{{- if .Values.tls.secretName }}
- --grpc-use-ssl=true
- --grpc-server-cert=/etc/conch/tls/tls.crt
- --grpc-server-key=/etc/conch/tls/tls.key
{{- if .Values.tls.requireClientCertificates }}
- --grpc-use-ssl-mutual=true
- --grpc-root-cert=/etc/conch/tls/ca.crt
{{- end }}
{{- if .Values.http.enabled }}
- --http-use-ssl=true
- --http-server-cert=/etc/conch/tls/tls.crt
- --http-server-key=/etc/conch/tls/tls.key
{{- if .Values.tls.requireClientCertificates }}
- --http-root-cert=/etc/conch/tls/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.accessPolicy.secretName }}
- {{ printf "--access-policy=/etc/conch/access/%s" .Values.accessPolicy.key | quote }}
{{- end }}
{{- range $name := keys .Values.settings | sortAlpha }}
{{- $value := index $.Values.settings $name }}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
- {{ printf "--%s=%s" $name (include "conch.text" .) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "conch.scheme" -}}
{{- if .Values.tls.secretName -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* "true" if the kubelet can ask over HTTP: it has no certificate of its own. */}}
{{- define "conch.probedByHttp" -}}
{{- if and .Values.http.enabled (not .Values.tls.requireClientCertificates) -}}true{{- end -}}
{{- end -}}

{{/* Where the kubelet can ask for the health: REST, or else the metrics port, which has no TLS and asks for no
     credentials. Takes a dict of root and path. */}}
{{- define "conch.healthGet" -}}
httpGet:
  path: /v2/health/{{ .path }}
  {{- if include "conch.probedByHttp" .root }}
  port: http
  scheme: {{ include "conch.scheme" .root | upper }}
  {{- else }}
  port: metrics
  scheme: HTTP
  {{- end }}
{{- end -}}

{{/* Whether the server is alive: it listens, which it does when the models of the start are loaded. */}}
{{- define "conch.liveHandler" -}}
{{- include "conch.healthGet" (dict "root" . "path" "live") -}}
{{- end -}}

{{/* Whether the server is to get requests. Kubernetes' gRPC probe knows no TLS. */}}
{{- define "conch.readyHandler" -}}
{{- if or .Values.http.enabled .Values.tls.secretName -}}
{{- include "conch.healthGet" (dict "root" . "path" "ready") -}}
{{- else -}}
grpc:
  port: 8001
{{- end -}}
{{- end -}}

{{/* What holds for the server's container and for the one that fetches models. */}}
{{- define "conch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What KEDA asks for: a metric of the adapter's rules, summed over the pods of this release. Pods that are gone, whose
     counters are still in the range of the query, have no conch_ready. Takes a dict of root and metric. */}}
{{- define "conch.kedaQuery" -}}
{{- $root := .root -}}
{{- $metric := .metric -}}
{{- $rules := (fromYaml ($root.Files.Get "files/prometheus/adapter.yml")).rules.custom -}}
{{- $pods := printf "namespace=%q,pod=~%q" $root.Release.Namespace (printf "%s-[a-z0-9]+-[a-z0-9]+" (include "conch.fullname" $root)) -}}
{{- range $rules -}}
{{- if eq .name.as $metric -}}
{{- $query := .metricsQuery | replace "<<.LabelMatchers>>" $pods | replace "<<.GroupBy>>" "pod" -}}
{{- printf "sum((%s) and on (pod) conch_ready{%s})" $query $pods -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An emptyDir, with a limit if there is one. */}}
{{- define "conch.emptyDir" -}}
{{- if . -}}
emptyDir:
  sizeLimit: {{ . | quote }}
{{- else -}}
emptyDir: {}
{{- end -}}
{{- end -}}
