{{/*
Sets the image and the model of a pod template from the values. Takes a dict with root and template,
and changes template.
*/}}
{{- define "kvrelay.settle" -}}
{{- $values := .root.Values -}}
{{- $spec := .template.spec -}}
{{- range $container := concat (default list $spec.initContainers) $spec.containers -}}
  {{- $_ := set . "image" (printf "%s:%s" $values.image.name $values.image.tag) -}}
  {{- with $values.image.digest -}}
    {{- $_ := set $container "image" (printf "%s@%s" $values.image.name .) -}}
  {{- end -}}
  {{- if $values.image.pullPolicy -}}
    {{- $_ := set . "imagePullPolicy" $values.image.pullPolicy -}}
  {{- end -}}
  {{- if and $values.model.claim (ne .name "ray-head") -}}
    {{- $mount := dict "name" "models" "mountPath" "/models" "readOnly" true -}}
    {{- $_ := set . "volumeMounts" (append .volumeMounts $mount) -}}
  {{- end -}}
{{- end -}}
{{- if $values.model.claim -}}
  {{- $claim := dict "claimName" $values.model.claim "readOnly" true -}}
  {{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "models" "persistentVolumeClaim" $claim)) -}}
{{- end -}}
{{- end -}}

{{/*
Does the same for a worker pod and sets the resources of its pool. The dict also contains pool.
*/}}
{{- define "kvrelay.settleWorker" -}}
{{- $pool := index .root.Values .pool -}}
{{- $_ := set (first .template.spec.containers) "resources" $pool.resources -}}
{{- if $pool.tolerations -}}
  {{- $_ := set .template.spec "tolerations" $pool.tolerations -}}
{{- end -}}
{{- include "kvrelay.settle" . -}}
{{- end -}}
