"""Parts of the manifests' schemas: plain values, metadata, containers, pods."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
BOOL: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
PORT_NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9][-a-z0-9]{0,14}$"}
PORT_REF: Schema = {"anyOf": [PORT, PORT_NAME]}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
ABSOLUTE: Schema = {"type": "string", "pattern": "^/"}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def obj(*required: str, **properties: Schema) -> Schema:
    """An object with just these properties; `required` must be there."""
    assert set(required) <= set(properties), required
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


LABEL_KEY = r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$"
LABELS: Schema = {
    "type": "object",
    "patternProperties": {LABEL_KEY: {"type": "string", "pattern": r"^([A-Za-z0-9][-_.A-Za-z0-9]{0,62})?$"}},
    "additionalProperties": False,
}
ANNOTATIONS: Schema = mapping({"type": "string"})
METADATA = obj("name", name=NAME, namespace=NAME, labels=LABELS, annotations=ANNOTATIONS)
TEMPLATE_METADATA = obj(labels=LABELS, annotations=ANNOTATIONS)
SELECTOR = obj("matchLabels", matchLabels=LABELS)

RESOURCES = obj(requests=mapping(QUANTITY), limits=mapping(QUANTITY))
PROBE: Schema = obj(
    "httpGet",
    httpGet=obj("path", "port", path=ABSOLUTE, port=PORT_REF),
    initialDelaySeconds=COUNT,
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = obj(
    "name",
    "image",
    name=NAME,
    image=STRING,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=array(STRING),
    args=array(STRING),
    env=array(obj("name", "value", name=STRING, value={"type": "string"})),
    ports=array(obj("containerPort", name=PORT_NAME, containerPort=PORT, protocol=one_of("TCP", "UDP"))),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=RESOURCES,
    securityContext=obj(
        "allowPrivilegeEscalation",
        allowPrivilegeEscalation=one_of(False),
        readOnlyRootFilesystem=BOOL,
        capabilities=obj("drop", drop={"const": ["ALL"]}, add=array(STRING)),
    ),
    volumeMounts=array(
        obj("name", "mountPath", name=NAME, mountPath=ABSOLUTE, readOnly=BOOL, subPath=STRING)
    ),
)
VOLUME: Schema = {
    "oneOf": [
        obj("name", "configMap", name=NAME, configMap=obj("name", name=STRING)),
        obj(
            "name",
            "secret",
            name=NAME,
            secret=obj("secretName", secretName=STRING, defaultMode={"type": "integer", "maximum": 0o440}),
        ),
        obj("name", "emptyDir", name=NAME, emptyDir=obj(medium=one_of("Memory"), sizeLimit=QUANTITY)),
    ]
}
POD_SPEC = obj(
    "containers",
    "securityContext",
    containers=array(CONTAINER),
    volumes=array(VOLUME),
    serviceAccountName=NAME,
    automountServiceAccountToken=one_of(False),
    priorityClassName=NAME,
    terminationGracePeriodSeconds=COUNT,
    hostNetwork=BOOL,
    nodeSelector=LABELS,
    securityContext=obj(
        "runAsNonRoot",
        "runAsUser",
        runAsNonRoot=one_of(True),
        runAsUser={"type": "integer", "minimum": 1},
        runAsGroup={"type": "integer", "minimum": 1},
        fsGroup={"type": "integer", "minimum": 1},
        seccompProfile=obj("type", type=one_of("RuntimeDefault")),
    ),
)
POD_TEMPLATE = obj("spec", metadata=TEMPLATE_METADATA, spec=POD_SPEC)


def kind(api_version: str, name: str, *required: str, **properties: Schema) -> Schema:
    return obj(
        "apiVersion",
        "kind",
        "metadata",
        *required,
        apiVersion=one_of(api_version),
        kind=one_of(name),
        metadata=METADATA,
        **properties,
    )
