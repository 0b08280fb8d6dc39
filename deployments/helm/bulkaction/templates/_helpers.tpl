{{- define "bulkaction.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "bulkaction.fullname" -}}
{{- $name := include "bulkaction.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels that all pods of the release have, and nothing else. */}}
{{- define "bulkaction.selector" -}}
app.kubernetes.io/name: {{ include "bulkaction.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The labels of one role, or of one entry of workers: .root, .role, .pool. */}}
{{- define "bulkaction.roleSelector" -}}
{{ include "bulkaction.selector" .root }}
app.kubernetes.io/component: {{ .role }}
{{- with .pool }}
bulkaction.io/worker: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "bulkaction.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: bulkaction
{{- end -}}

{{/* A quantity of memory such as 512Mi as the number of bytes that is 90% of it. */}}
{{- define "bulkaction.gomemlimit" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]*$" .)) 0.9 | floor | int64 -}}
{{- end -}}

{{/* A value of an environment variable. YAML reads 1000000 as a float, which would be printed as 1e+06. */}}
{{- define "bulkaction.value" -}}
{{- if and (kindIs "float64" .) (eq (int64 . | float64) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* The Internet without private networks and addresses of metadata, as peers of an egress rule. */}}
{{- define "bulkaction.internet" -}}
- ipBlock:
    cidr: 0.0.0.0/0
    except: {{- toYaml .Values.networkPolicy.internetExcept | nindent 6 }}
- ipBlock: {cidr: "2000::/3", except: ["2001::/23", "2002::/16"]} # the global addresses of IPv6
{{- end -}}

{{/* The ports of a peer, as text. */}}
{{- define "bulkaction.ports" -}}
{{- range $i, $port := .ports }}{{ if $i }} {{ end }}{{ int $port }}{{ end -}}
{{- end -}}

{{/* Stops with a message if values contradict each other, which the schema can't see. */}}
{{- define "bulkaction.check" -}}
{{- if contains "@" .Values.redis.url }}{{ fail "redis.url contains a user or password, which everybody could read in the Deployments: put the URL into a Secret and name it in redis.urlSecret" }}{{ end }}
{{- if not (or .Values.redis.url .Values.redis.urlSecret.name) }}{{ fail "redis.url or redis.urlSecret.name must be set" }}{{ end }}
{{- if and .Values.redis.usersSecret (or .Values.redis.username .Values.redis.passwordSecret.name) }}{{ fail "redis.usersSecret gives each role its user: leave redis.username and redis.passwordSecret.name empty" }}{{ end }}
{{- if and .Values.broker.enabled (not (and .Values.broker.publicURL .Values.broker.tokenKeysSecret.name)) }}{{ fail "broker.enabled needs broker.publicURL and broker.tokenKeysSecret.name" }}{{ end }}
{{- if .Values.networkPolicy.enabled }}
{{- $url := .Values.redis.url }}
{{- range splitList "," (regexReplaceAll "^[a-z-]+://|[/?].*$" $url "") }}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" .) | default (ternary "26379" "6379" (contains "-sentinel:" $url)) }}
{{- if and $url (not (has $port (include "bulkaction.ports" $.Values.networkPolicy.redis | splitList " "))) }}{{ fail (printf "redis.url: the network policy does not allow port %s: add it to networkPolicy.redis.ports" $port) }}{{ end }}
{{- end }}
{{- with .Values.otlp }}{{ if .endpoint }}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" (regexReplaceAll "^https?://|[/?].*$" .endpoint "")) | default (ternary "80" "443" (and (hasPrefix "http:" .endpoint) (ne .protocol "grpc"))) }}
{{- if not (has $port (include "bulkaction.ports" $.Values.networkPolicy.otlp | splitList " ")) }}{{ fail (printf "otlp.endpoint: the network policy does not allow port %s: add it to networkPolicy.otlp.ports" $port) }}{{ end }}
{{- end }}{{ end }}
{{- end }}
{{- $names := dict }}{{ $scaled := dict }}
{{- range $entry := .Values.workers }}
{{- if hasKey $names .name }}{{ fail (printf "workers: two entries have the name %s: give each a name of its own" .name) }}{{ end }}
{{- $_ := set $names .name true }}
{{- range $variable, $key := dict "BULKACTION_WORKER_COUNT" "slots" "BULKACTION_WORKER_TYPES" "types" }}
{{- if or (hasKey $.Values.env $variable) (hasKey (default dict $entry.env) $variable) }}{{ fail (printf "env: set %s of each entry of workers instead of %s" $key $variable) }}{{ end }}
{{- end }}
{{- with .scaling }}{{ if .enabled }}
{{- range $entry.types }}
{{- if hasKey $scaled . }}{{ fail (printf "workers: the type %s is in two entries with scaling: each would start processes for all of its jobs" .) }}{{ end }}
{{- $_ := set $scaled . true }}
{{- end }}
{{- if gt (int (default 1 .min)) (int (default 20 .max)) }}{{ fail "workers: scaling.min is above scaling.max" }}{{ end }}
{{- end }}{{ end }}
{{- if and (default dict .scaling).enabled (not .types) }}{{ fail (printf "workers: the entry %s has scaling, so it must name its types" .name) }}{{ end }}
{{- end }}
{{- end -}}
