{{/*
The Deployment of a role or of an entry of workers, with its disruption budget and network policy.
.root: the chart's context, .role: the role, .pool: the name of the entry of workers, or nothing,
.values: what the role or the entry sets itself.
*/}}
{{- define "bulkaction.workload" -}}
{{- $all := .root.Values -}}
{{- $own := .values -}}
{{- $v := deepCopy $all.defaults -}}
{{- if eq .role "worker" }}{{ $_ := set $v "maxUnavailable" "25%" }}{{ $_ = set $v "slots" 10 }}{{ end -}}
{{- range $key, $value := $own }}{{ $_ := set $v $key $value }}{{ end -}}
{{- $name := printf "%s-%s" (include "bulkaction.fullname" .root) .role -}}
{{- with .pool }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- $served := dict "ingest" "api" "broker" "visitors" -}}
{{- $prefix := dict "ingest" "API" "broker" "BROKER" -}}
{{- $room := and $all.broker.enabled (has .role (list "ingest" "broker")) -}}
{{- $calls := and $all.callbacks.masterKeySecret.name (has .role (list "ingest" "watcher")) -}}
{{- $internet := or (and (eq .role "worker") (ne (toString $v.internet) "false")) (and $calls (eq .role "watcher")) -}}
{{- $grace := int $v.shutdownGracePeriodSeconds -}}
{{- $drain := int (default 0 $v.drainDelaySeconds) -}}

{{- /* Files from Secrets: each has a variable that names it. */ -}}
{{- $files := list -}}
{{- $redis := $all.redis -}}
{{- if not $redis.url }}{{ $files = append $files (dict "env" "BULKACTION_REDIS_URL_FILE" "secret" $redis.urlSecret.name "key" $redis.urlSecret.key) }}{{ end -}}
{{- if $redis.usersSecret }}{{ $files = append $files (dict "env" "BULKACTION_REDIS_PASSWORD_FILE" "secret" $redis.usersSecret "key" .role) }}{{ end -}}
{{- $single := dict "BULKACTION_REDIS_PASSWORD_FILE" $redis.passwordSecret "BULKACTION_REDIS_TLS_CA_FILE" $redis.tls.caSecret "BULKACTION_ADMIN_TOKEN_FILE" $all.auth.adminTokenSecret -}}
{{- if eq .role "ingest" }}{{ $_ := set $single "BULKACTION_AUTH_PEPPER_FILE" $all.auth.pepperSecret }}{{ $_ = set $single "BULKACTION_AUTH_KEYS_FILE" $all.auth.keysFileSecret }}{{ end -}}
{{- if $room }}{{ $_ := set $single "BULKACTION_BROKER_TOKEN_KEYS_FILE" $all.broker.tokenKeysSecret }}{{ end -}}
{{- if $calls }}{{ $_ := set $single "BULKACTION_CALLBACK_MASTER_KEY_FILE" $all.callbacks.masterKeySecret }}{{ end -}}
{{- range $variable, $ref := $single }}{{ if $ref.name }}{{ $files = append $files (dict "env" $variable "secret" $ref.name "key" $ref.key) }}{{ end }}{{ end -}}
{{- $certificates := dict "BULKACTION_REDIS" $redis.tls.certSecret -}}
{{- if hasKey $served .role }}{{ $_ := set $certificates (printf "BULKACTION_%s" (get $prefix .role)) $v.tlsSecret }}{{ end -}}
{{- range $of, $secret := $certificates }}{{ if $secret -}}
{{- $files = concat $files (list (dict "env" (printf "%s_TLS_CERT_FILE" $of) "secret" $secret "key" "tls.crt") (dict "env" (printf "%s_TLS_KEY_FILE" $of) "secret" $secret "key" "tls.key")) -}}
{{- end }}{{ end -}}
{{- $files = concat $files $all.secretFiles (default list $own.secretFiles) -}}

{{- $env := dict "BULKACTION_ADMIN_ADDR" "0.0.0.0:9090" "BULKACTION_PARTITIONS" $redis.partitions "BULKACTION_KEY_PREFIX" $redis.keyPrefix "BULKACTION_SHUTDOWN_GRACE_PERIOD" (printf "%ds" $grace) -}}
{{- with $redis.url }}{{ $_ := set $env "BULKACTION_REDIS_URL" . }}{{ end -}}
{{- with ternary .role $redis.username (ne $redis.usersSecret "") }}{{ $_ := set $env "BULKACTION_REDIS_USERNAME" . }}{{ end -}}
{{- with $redis.tls.serverName }}{{ $_ := set $env "BULKACTION_REDIS_TLS_SERVER_NAME" . }}{{ end -}}
{{- with $all.otlp.endpoint }}{{ $_ := set $env "OTEL_EXPORTER_OTLP_ENDPOINT" . }}{{ $_ = set $env "OTEL_EXPORTER_OTLP_PROTOCOL" $all.otlp.protocol }}{{ $_ = set $env "OTEL_METRICS_EXPORTER" "none" }}{{ end -}}
{{- if hasKey $served .role -}}
{{- $of := printf "BULKACTION_%s" (get $prefix .role) -}}
{{- $_ := set $env (printf "%s_ADDR" $of) (ternary "0.0.0.0:8080" "0.0.0.0:8090" (eq .role "ingest")) -}}
{{- if not $v.tlsSecret }}{{ $_ := set $env (printf "%s_ALLOW_PLAINTEXT" $of) true }}{{ end -}}
{{- end -}}
{{- if eq .role "ingest" }}{{ $_ := set $env "BULKACTION_AUTH" "keys" }}{{ $_ = set $env "BULKACTION_API_DRAIN_DELAY" (printf "%ds" $drain) }}{{ end -}}
{{- if $room }}{{ $_ := set $env "BULKACTION_BROKER_PUBLIC_URL" $all.broker.publicURL }}{{ end -}}
{{- if and $calls $all.callbacks.allowedCIDRs }}{{ $_ := set $env "BULKACTION_CALLBACK_ALLOWED_CIDRS" (join "," $all.callbacks.allowedCIDRs) }}{{ end -}}
{{- if eq .role "worker" }}{{ $_ := set $env "BULKACTION_WORKER_COUNT" $v.slots }}{{ with $v.types }}{{ $_ := set $env "BULKACTION_WORKER_TYPES" (join "," .) }}{{ end }}{{ end -}}
{{- with dig "limits" "memory" "" $v.resources }}{{ $_ := set $env "GOMEMLIMIT" (include "bulkaction.gomemlimit" .) }}{{ end -}}
{{- $file := dict -}}
{{- range $files -}}
{{- $_ := set . "path" (.env | trimPrefix "BULKACTION_" | lower | replace "_" "-") -}}
{{- $_ = set $env .env (printf "/run/secrets/bulkaction/%s" .path) -}}
{{- $_ = set $file .env . -}}{{/* a later file replaces an earlier one of the same variable */}}
{{- end -}}
{{- range list $all.env (default dict $own.env) }}{{ range $variable, $value := . }}{{ $_ := set $env $variable $value }}{{ end }}{{ end -}}

{{- $image := default $all.image $v.image -}}
{{- $command := ternary (default list $v.command) (list "/usr/local/bin/bulkaction" .role) (or (hasKey $v "command") (hasKey $v "image")) -}}
{{- $scaled := (default dict $v.scaling).enabled -}}
{{- $labels := printf "%s\n%s" (include "bulkaction.roleSelector" .) (include "bulkaction.labels" .root) | fromYaml -}}
{{- range $key, $value := $v.podLabels }}{{ if hasKey $labels $key }}{{ fail (printf "podLabels: the chart sets %s itself: take another label" $key) }}{{ end }}{{ end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "bulkaction.roleSelector" . | nindent 4 }}
    {{- include "bulkaction.labels" .root | nindent 4 }}
spec:
  {{- if not $scaled }}
  replicas: {{ $v.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "bulkaction.roleSelector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "bulkaction.roleSelector" . | nindent 8 }}
        {{- include "bulkaction.labels" .root | nindent 8 }}
        {{- with $v.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $v.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      # The variables of Services would begin with BULKACTION_, too.
      enableServiceLinks: false
      {{- with $v.serviceAccountName }}
      serviceAccountName: {{ . | quote }}
      {{- end }}
      {{- with $v.priorityClassName }}
      priorityClassName: {{ . | quote }}
      {{- end }}
      {{- with $all.imagePullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . | quote }}
        {{- end }}
      {{- end }}
      # {{ $grace }} s of the grace period, and the time to drain and to end.
      terminationGracePeriodSeconds: {{ add $grace (max 15 (add $drain 10)) }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      topologySpreadConstraints:
        {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - topologyKey: {{ . }}
          maxSkew: 1
          whenUnsatisfiable: ScheduleAnyway
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels: {{- include "bulkaction.roleSelector" $ | nindent 14 }}
        {{- end }}
      {{- range $field := list "nodeSelector" "tolerations" "affinity" }}
      {{- with get $v $field }}
      {{ $field }}: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: "{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}"
          imagePullPolicy: {{ default $all.image.pullPolicy $image.pullPolicy }}
          {{- with $command }}
          command: {{ toJson . }}
          {{- end }}
          ports:
            - {name: admin, containerPort: 9090}
            {{- with get $served .role }}
            - {name: {{ . }}, containerPort: {{ ternary 8080 8090 (eq . "api") }}}
            {{- end }}
          env:
            {{- range $variable, $value := $env }}
            - name: {{ $variable | quote }}
              value: {{ include "bulkaction.value" $value | quote }}
            {{- end }}
          {{- with $v.envFrom }}
          envFrom: {{- toYaml . | nindent 12 }}
          {{- end }}
          startupProbe:
            httpGet: {path: /healthz, port: admin}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: {path: /healthz, port: admin}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            # What a Service routes to stays ready while Redis is away, and answers 503 with Retry-After itself.
            httpGet: {path: "/readyz{{ if hasKey $served .role }}?for=traffic{{ end }}", port: admin}
            periodSeconds: 5
            timeoutSeconds: 5
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          resources: {{- toYaml $v.resources | nindent 12 }}
          {{- if or $file $v.extraVolumeMounts }}
          volumeMounts:
            {{- if $file }}
            - {name: secrets, mountPath: /run/secrets/bulkaction, readOnly: true}
            {{- end }}
            {{- with $v.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
          {{- end }}
      {{- if or $file $v.extraVolumes }}
      volumes:
        {{- if $file }}
        - name: secrets
          projected:
            defaultMode: 0440 # the roles refuse secrets that everybody may read
            sources:
              {{- range $file }}
              - secret: {name: {{ .secret | quote }}, items: [{key: {{ .key | quote }}, path: {{ .path | quote }}}]}
              {{- end }}
        {{- end }}
        {{- with $v.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "bulkaction.roleSelector" . | nindent 4 }}
spec:
  maxUnavailable: {{ $v.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow # pods that are not ready because Redis is away stop no drain of a node
  selector:
    matchLabels: {{- include "bulkaction.roleSelector" . | nindent 6 }}
{{- if and $all.networkPolicy.enabled (or $internet $v.extraEgress (hasKey $served .role)) }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ $name }}
  labels: {{- include "bulkaction.roleSelector" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "bulkaction.roleSelector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  {{- with get $served .role }}
  ingress:
    - ports: [{port: {{ . }}}]
      {{- with $all.networkPolicy.clients }}
      from: {{- toYaml . | nindent 8 }}
      {{- end }}
  {{- end }}
  {{- if or $internet $v.extraEgress }}
  egress:
    {{- if $internet }}
    - to:
        {{- include "bulkaction.internet" .root | nindent 8 }}
        {{- if $calls }}{{ range $all.callbacks.allowedCIDRs }}
        - ipBlock: {cidr: {{ . | quote }}}
        {{- end }}{{ end }}
    {{- end }}
    {{- with $v.extraEgress }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
{{- end }}
{{- end -}}
