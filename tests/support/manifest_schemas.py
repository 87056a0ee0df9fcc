"""JSON schemas of what `deploy/` uses of Kubernetes, LeaderWorkerSet, Kubeflow, the Prometheus operator, Prometheus
rules and kustomize, written down from their API references. Strict: a field that is not listed is an error, so that a
misspelt or misplaced one is found without a cluster."""

from __future__ import annotations

from support.manifest_parts import (
    ABSOLUTE,
    BOOL,
    COUNT,
    DURATION,
    LABELS,
    METADATA,
    NAME,
    POD_TEMPLATE,
    PORT,
    PORT_NAME,
    PORT_REF,
    RESOURCES,
    SELECTOR,
    STRING,
    TEMPLATE_METADATA,
    Schema,
    array,
    kind,
    mapping,
    obj,
    one_of,
)

SERVICE = kind(
    "v1",
    "Service",
    "spec",
    spec=obj(
        "selector",
        "ports",
        clusterIP=one_of("None"),
        type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
        publishNotReadyAddresses=BOOL,
        selector=LABELS,
        ports=array(obj("name", "port", name=PORT_NAME, port=PORT, targetPort=PORT_REF)),
    ),
)
STATEFUL_SET = kind(
    "apps/v1",
    "StatefulSet",
    "spec",
    spec=obj(
        "serviceName",
        "replicas",
        "selector",
        "template",
        serviceName=NAME,
        replicas=COUNT,
        podManagementPolicy=one_of("OrderedReady", "Parallel"),
        updateStrategy=obj("type", type=one_of("RollingUpdate", "OnDelete")),
        selector=SELECTOR,
        template=POD_TEMPLATE,
        volumeClaimTemplates=array(
            obj(
                "metadata",
                "spec",
                apiVersion=one_of("v1"),
                kind=one_of("PersistentVolumeClaim"),
                metadata=METADATA,
                spec=obj(
                    "accessModes",
                    "resources",
                    accessModes=array(one_of("ReadWriteOnce", "ReadWriteOncePod")),
                    storageClassName=NAME,
                    resources=RESOURCES,
                ),
            )
        ),
    ),
)
PEER = obj(podSelector=SELECTOR, namespaceSelector=SELECTOR)
POLICY_PORTS = array(obj("port", protocol=one_of("TCP", "UDP"), port=PORT_REF))
NETWORK_POLICY = kind(
    "networking.k8s.io/v1",
    "NetworkPolicy",
    "spec",
    spec={
        **obj(
            "podSelector",
            "policyTypes",
            podSelector=SELECTOR,
            policyTypes=array(one_of("Ingress", "Egress")),
            ingress=array(obj("from", **{"from": array(PEER), "ports": POLICY_PORTS}), 0),
            egress=array(obj("to", to=array(PEER), ports=POLICY_PORTS), 0),
        )
    },
)
LEADER_WORKER_SET = kind(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    "spec",
    spec=obj(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        networkConfig=obj(
            "subdomainPolicy",
            subdomainPolicy=one_of("Shared", "UniquePerReplica", "UniquePerReplicaLeaderWorker"),
        ),
        rolloutStrategy=obj(
            "type",
            type=one_of("RollingUpdate"),
            rollingUpdateConfiguration=obj(maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
        ),
        leaderWorkerTemplate=obj(
            "workerTemplate",
            "size",
            leaderTemplate=POD_TEMPLATE,
            workerTemplate=POD_TEMPLATE,
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
        ),
    ),
)
REPLICA_SPEC = obj(
    "replicas",
    "template",
    replicas=COUNT,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=POD_TEMPLATE,
)
PYTORCH_JOB = kind(
    "kubeflow.org/v1",
    "PyTorchJob",
    "spec",
    spec=obj(
        "pytorchReplicaSpecs",
        nprocPerNode=STRING,
        runPolicy=obj(
            cleanPodPolicy=one_of("Running", "All", "None"),
            backoffLimit=COUNT,
            ttlSecondsAfterFinished=COUNT,
            activeDeadlineSeconds=COUNT,
            suspend=BOOL,
        ),
        elasticPolicy=obj(
            rdzvBackend=one_of("c10d"),
            rdzvHost=STRING,
            rdzvPort=PORT,
            rdzvId=STRING,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            maxRestarts=COUNT,
        ),
        pytorchReplicaSpecs=obj(Master=REPLICA_SPEC, Worker=REPLICA_SPEC),
    ),
)
TRAINER = "trainer.kubeflow.org/v1alpha1"
TRAINING_RUNTIME = kind(
    TRAINER,
    "TrainingRuntime",
    "spec",
    spec=obj(
        "template",
        mlPolicy=obj(numNodes=COUNT, torch=obj()),
        template=obj(
            "spec",
            metadata=TEMPLATE_METADATA,
            spec=obj(
                "replicatedJobs",
                replicatedJobs=array(
                    obj(
                        "name",
                        "template",
                        name=NAME,
                        template=obj(
                            "spec", metadata=TEMPLATE_METADATA, spec=obj("template", template=POD_TEMPLATE)
                        ),
                    )
                ),
            ),
        ),
    ),
)
TRAIN_JOB = kind(
    TRAINER,
    "TrainJob",
    "spec",
    spec=obj(
        "runtimeRef",
        runtimeRef=obj(
            "name",
            apiGroup=one_of("trainer.kubeflow.org"),
            kind=one_of("TrainingRuntime", "ClusterTrainingRuntime"),
            name=NAME,
        ),
        trainer=obj(
            image=STRING,
            command=array(STRING),
            args=array(STRING),
            env=array(obj("name", "value", name=STRING, value={"type": "string"})),
            numNodes={"type": "integer", "minimum": 1},
            numProcPerNode={"anyOf": [{"type": "integer", "minimum": 1}, one_of("auto", "cpu", "gpu")]},
            resourcesPerNode=RESOURCES,
        ),
        suspend=BOOL,
    ),
)
ENDPOINT = obj(
    port=PORT_NAME, path=ABSOLUTE, interval=DURATION, scrapeTimeout=DURATION, scheme=one_of("http", "https")
)
MONITORING = "monitoring.coreos.com/v1"
SERVICE_MONITOR = kind(
    MONITORING,
    "ServiceMonitor",
    "spec",
    spec=obj("selector", "endpoints", selector=SELECTOR, endpoints=array(ENDPOINT), jobLabel=STRING),
)
POD_MONITOR = kind(
    MONITORING,
    "PodMonitor",
    "spec",
    spec=obj("selector", "podMetricsEndpoints", selector=SELECTOR, podMetricsEndpoints=array(ENDPOINT)),
)
RULE: Schema = {
    "oneOf": [
        obj(
            "alert",
            "expr",
            "labels",
            "annotations",
            alert={"type": "string", "pattern": "^[A-Z][A-Za-z0-9]+$"},
            expr=STRING,
            **{"for": DURATION},
            labels=obj("severity", severity=one_of("critical", "warning", "info")),
            annotations=obj(
                "summary",
                "description",
                "runbook_url",
                summary=STRING,
                description=STRING,
                runbook_url=STRING,
            ),
        ),
        obj("record", "expr", record={"type": "string", "pattern": "^[a-z_]+(:[a-z0-9_]+)+$"}, expr=STRING),
    ]
}
RULE_GROUPS = array(obj("name", "rules", name=STRING, interval=DURATION, rules=array(RULE)))
RULE_FILE = obj("groups", groups=RULE_GROUPS)
PROMETHEUS_RULE = kind(MONITORING, "PrometheusRule", "spec", spec=obj("groups", groups=RULE_GROUPS))
SCRAPE_FILE = obj(
    "scrape_configs",
    global_={},
    rule_files=array(STRING),
    scrape_configs=array(
        obj(
            "job_name",
            "static_configs",
            job_name=STRING,
            scrape_interval=DURATION,
            metrics_path=ABSOLUTE,
            static_configs=array(obj("targets", targets=array(STRING))),
        )
    ),
)
GENERATOR = array(
    obj("name", "files", name=NAME, files=array(STRING), options=obj(disableNameSuffixHash=BOOL))
)
KUSTOMIZATION = obj(
    "apiVersion",
    "kind",
    "resources",
    apiVersion=one_of("kustomize.config.k8s.io/v1beta1"),
    kind=one_of("Kustomization"),
    namespace=NAME,
    resources=array(STRING),
    labels=array(obj("pairs", pairs=LABELS, includeSelectors=BOOL, includeTemplates=BOOL)),
    images=array(obj("name", name=STRING, newName=STRING, newTag=STRING)),
    configMapGenerator=GENERATOR,
    secretGenerator=GENERATOR,
    patches=array(obj(path=STRING, patch=STRING, target=obj(kind=STRING, name=STRING))),
)
SERVICE_ACCOUNT = kind("v1", "ServiceAccount", automountServiceAccountToken=BOOL)
CONFIG_MAP = kind("v1", "ConfigMap", "data", data=mapping({"type": "string"}))
SECRET = kind("v1", "Secret", "data", "type", data=mapping({"type": "string"}), type=one_of("Opaque"))

SCHEMAS: dict[str, Schema] = {
    schema["properties"]["kind"]["enum"][0]: schema
    for schema in (
        SERVICE,
        STATEFUL_SET,
        NETWORK_POLICY,
        LEADER_WORKER_SET,
        PYTORCH_JOB,
        TRAINING_RUNTIME,
        TRAIN_JOB,
        SERVICE_MONITOR,
        POD_MONITOR,
        PROMETHEUS_RULE,
        KUSTOMIZATION,
        SERVICE_ACCOUNT,
        CONFIG_MAP,
        SECRET,
    )
}
