//! The manifests, by the schemas of Kubernetes, and by what they say of each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::tools::{
    check_command_line, has, python_package, root, said, skipped, strings, succeeds, text, yaml,
};
use crate::topology;

const FOLDER: &str = "deploy/kubernetes";
/// The schemas, and a program that checks by them, from PyPI.
const VALIDATOR: &str = "kubernetes-validate==1.37.0";
/// The versions of Kubernetes that the manifests are checked for.
const VERSIONS: [&str; 2] = ["1.28.0", "1.37.0"];
/// Kinds that are no part of Kubernetes: `custom_resources_*` looks at them.
const CUSTOM: [&str; 2] = ["ScaledObject", "TriggerAuthentication"];

/// The manifests that a kustomization names, and those of what it builds on.
fn named_by(folder: &str) -> Vec<Value> {
    let kustomization = yaml(&text(&format!("{FOLDER}/{folder}/kustomization.yaml"))).remove(0);
    let resources = kustomization["resources"].as_array().unwrap();
    let mut manifests = Vec::new();
    for resource in resources.iter().map(|resource| resource.as_str().unwrap()) {
        if let Some(base) = resource.strip_prefix("../") {
            manifests.extend(named_by(base));
        } else {
            manifests.extend(yaml(&text(&format!("{FOLDER}/{folder}/{resource}"))));
        }
    }
    manifests
}

/// All manifests, an example's too.
fn all() -> Vec<Value> {
    let mut manifests = named_by("keda");
    manifests.extend(named_by("hpa"));
    manifests.extend(yaml(&text(&format!("{FOLDER}/secret.example.yaml"))));
    manifests
}

fn of_kind<'m>(manifests: &'m [Value], kind: &str) -> Vec<&'m Value> {
    manifests.iter().filter(|manifest| manifest["kind"] == kind).collect()
}

/// What a manifest is called.
fn name(manifest: &Value) -> &str {
    manifest["metadata"]["name"].as_str().unwrap()
}

/// The manifests below `deploy/kubernetes` that kubectl would send.
fn files() -> Vec<PathBuf> {
    let folders = ["", "base", "keda", "hpa", "hosts"].map(|folder| root().join(FOLDER).join(folder));
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let files = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let sent = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        !["kustomization.yaml", "adapter-rules.yaml"].contains(&name)
    };
    files.filter(sent).collect()
}

/// The package holds the schemas of a dozen versions, in two forms: 100 MB that nobody reads.
fn keep_what_is_used(packages: &Path) {
    let used = VERSIONS.map(|version| format!("v{version}-local-strict"));
    for entry in
        std::fs::read_dir(packages.join("kubernetes_validate/kubernetes-json-schema")).unwrap().flatten()
    {
        if !used.iter().any(|used| entry.file_name() == used.as_str()) {
            // Another test process may be faster.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[test]
fn manifests_are_as_the_schemas_have_them() {
    let Some(packages) = python_package(VALIDATOR) else { return };
    keep_what_is_used(&packages);
    for version in VERSIONS {
        let mut validate = Command::new("python3");
        validate.args(["-m", "kubernetes_validate", "--strict", "--kubernetes-version", version]);
        let output = succeeds(validate.args(files()).env("PYTHONPATH", &packages));
        // What it has no schema for it only warns of.
        for line in said(&output).lines().filter(|line| !line.starts_with("INFO ")) {
            assert!(CUSTOM.iter().any(|kind| line.contains(kind)), "{version}: {line}");
        }
    }
}

#[test]
fn kubectl_builds_every_kustomization() {
    if !has("kubectl") {
        skipped("no kubectl here");
        return;
    }
    let version = env!("CARGO_PKG_VERSION");
    for folder in ["base", "keda", "hpa", "hosts"] {
        let built = succeeds(Command::new("kubectl").arg("kustomize").arg(root().join(FOLDER).join(folder)));
        let built = yaml(&String::from_utf8(built.stdout).unwrap());
        assert_eq!(built.len(), named_by(folder).len(), "{folder}");
        let mut fixed = BTreeSet::new();
        for deployment in of_kind(&built, "Deployment") {
            let pod = &deployment["spec"]["template"]["spec"];
            let own = if folder == "hosts" { &pod["initContainers"][0] } else { &pod["containers"][0] };
            assert_eq!(own["image"], format!("weighbridge:{version}"), "{folder}");
            if deployment["spec"].get("replicas").is_some() {
                fixed.insert(name(deployment));
            }
        }
        // How many there are is said by one alone.
        for scaled in
            of_kind(&built, "ScaledObject").into_iter().chain(of_kind(&built, "HorizontalPodAutoscaler"))
        {
            assert!(!fixed.contains(scaled["spec"]["scaleTargetRef"]["name"].as_str().unwrap()), "{folder}");
        }
    }
}

#[test]
fn every_file_belongs_to_a_kustomization_or_is_an_example() {
    let known = all().into_iter().chain(named_by("hosts"));
    let listed: BTreeSet<_> =
        known.map(|manifest| (name(&manifest).to_owned(), manifest["kind"].to_string())).collect();
    for file in files() {
        for manifest in yaml(&std::fs::read_to_string(&file).unwrap()) {
            assert!(
                listed.contains(&(name(&manifest).to_owned(), manifest["kind"].to_string())),
                "{}",
                file.display()
            );
        }
    }
}

#[test]
fn workers_are_started_stopped_and_probed_as_workers_are() {
    let manifests = named_by("base");
    let configuration = of_kind(&manifests, "ConfigMap")[0]["data"]["weighbridge.toml"].as_str().unwrap();
    let configuration = weighbridge::config::Config::parse(configuration).unwrap();
    let port = configuration.worker.listen.unwrap().port();
    let deployments = of_kind(&manifests, "Deployment");
    assert_eq!(deployments.len(), 4);
    for deployment in deployments {
        let pod = &deployment["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        check_command_line(&strings(&container["args"]));
        assert_eq!(container["ports"][0], json!({ "name": "metrics", "containerPort": port }));
        assert_eq!(container["livenessProbe"]["httpGet"], json!({ "path": "/live", "port": "metrics" }));
        // Who is not ready goes on trying; the API has callers, and takes them while the store is away.
        let is_api = name(deployment) == "weighbridge-api";
        assert_eq!(container["readinessProbe"]["tcpSocket"].is_object(), is_api, "{}", name(deployment));
        assert!(
            container["readinessProbe"].get("httpGet").is_none() && container.get("startupProbe").is_none()
        );
        let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
        assert!(grace > configuration.worker.stop_seconds.unwrap(), "{}", name(deployment));
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        let security = json!({ "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] } });
        assert_eq!(container["securityContext"], security);
        sees_its_store_and_mounts_what_it_has(deployment, pod, configuration.store.as_deref().unwrap());
    }
}

/// A store in a bucket is reached with what the secret has; another one has to be mounted.
fn sees_its_store_and_mounts_what_it_has(manifest: &Value, pod: &Value, store: &str) {
    let container = &pod["containers"][0];
    let mounts = container["volumeMounts"].as_array().unwrap();
    let has_keys = container["envFrom"][0]["secretRef"]["name"].is_string();
    let is_mounted = mounts.iter().any(|mount| mount["mountPath"] == store);
    assert!(if store.contains("://") { has_keys } else { is_mounted }, "{}", name(manifest));
    let own = container["env"].as_array().unwrap().iter();
    assert!(own.clone().all(|variable| variable["name"] != "WEIGHBRIDGE_STORE"), "it goes before the file");
    assert!(own.clone().any(|variable| variable["name"] == "WEIGHBRIDGE_CONFIG"), "{}", name(manifest));
    let volumes: BTreeSet<_> =
        pod["volumes"].as_array().unwrap().iter().map(|volume| volume["name"].as_str()).collect();
    assert_eq!(volumes, mounts.iter().map(|mount| mount["name"].as_str()).collect(), "{}", name(manifest));
}

#[test]
fn garbage_is_collected_by_one_at_a_time_with_rights_of_its_own() {
    let manifests = named_by("base");
    let configuration = of_kind(&manifests, "ConfigMap")[0]["data"]["weighbridge.toml"].as_str().unwrap();
    let configuration = weighbridge::config::Config::parse(configuration).unwrap();
    let [job] = of_kind(&manifests, "CronJob")[..] else { panic!("not one CronJob") };
    assert_eq!(job["spec"]["concurrencyPolicy"], "Forbid");
    let template = &job["spec"]["jobTemplate"]["spec"]["template"];
    let (pod, labels) = (&template["spec"], &template["metadata"]["labels"]);
    check_command_line(&strings(&pod["containers"][0]["args"]));
    assert_eq!(pod["containers"][0]["args"][0], "gc");
    sees_its_store_and_mounts_what_it_has(job, pod, configuration.store.as_deref().unwrap());
    let worker = &of_kind(&manifests, "Deployment")[0]["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["securityContext"], worker["containers"][0]["securityContext"]);
    assert_eq!(pod["securityContext"]["runAsUser"], worker["securityContext"]["runAsUser"]);
    let network = &of_kind(&manifests, "NetworkPolicy")[0]["spec"]["podSelector"]["matchLabels"];
    assert!(network.as_object().unwrap().iter().all(|(key, value)| &labels[key] == value), "{labels}");
    // Who may delete is somebody else than who publishes.
    let all = all();
    for (kind, own, of_workers) in [
        ("ServiceAccount", &pod["serviceAccountName"], &worker["serviceAccountName"]),
        ("Secret", secret(pod), secret(worker)),
    ] {
        assert_ne!(own, of_workers, "{kind}");
        assert!(of_kind(&all, kind).into_iter().any(|it| name(it) == own), "{kind} {own}");
    }
}

/// The value of a container's option.
#[track_caller]
fn option<'m>(container: &'m Value, option: &str) -> &'m str {
    let found = strings(&container["args"])
        .into_iter()
        .find_map(|argument| argument.strip_prefix("--")?.strip_prefix(option)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no --{option} in {container}"))
}

/// That a file which an option names is a key of the secret that is mounted there.
#[track_caller]
fn is_of_a_secret(pod: &Value, container: &Value, path: &str, secrets: &[&Value]) {
    let (folder, key) = path.rsplit_once('/').unwrap();
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["mountPath"] == folder).unwrap_or_else(|| panic!("{path}"));
    assert_eq!(mount["readOnly"], true, "{path}");
    let volumes = pod["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
    let secret = secrets.iter().find(|secret| volume["secret"]["secretName"] == name(secret));
    assert!(secret.is_some_and(|secret| secret["stringData"][key].is_string()), "{path}: {volume}");
}

#[test]
fn the_api_is_offered_with_tls_and_tokens_and_is_reached() {
    let manifests = all();
    let secrets = of_kind(&manifests, "Secret");
    let named = |kind: &str| {
        let found = of_kind(&manifests, kind).into_iter().find(|it| name(it) == "weighbridge-api");
        found.unwrap_or_else(|| panic!("no {kind} of the API"))
    };
    let pod = &named("Deployment")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let port = option(container, "api-listen").rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
    assert_eq!(container["ports"][1], json!({ "name": "api", "containerPort": port }));
    assert_eq!(container["readinessProbe"]["tcpSocket"]["port"], "api");
    for file in ["tokens", "tls-certificate", "tls-key"] {
        is_of_a_secret(pod, container, option(container, file), &secrets);
    }
    assert_eq!(
        named("Service")["spec"]["ports"],
        json!([{ "name": "api", "port": port, "targetPort": "api" }])
    );
    assert_eq!(named("NetworkPolicy")["spec"]["ingress"][0]["ports"], json!([{ "port": "api" }]));
    let tokens = secrets.iter().find(|secret| name(secret) == "weighbridge-api-tokens").unwrap();
    let tokens = tokens["stringData"]["tokens.toml"].as_str().unwrap();
    let tokens = tokens.replace("64 HEXADECIMAL DIGITS", &"ab".repeat(32));
    assert_eq!(weighbridge::api::tokens::listed(&tokens).unwrap().len(), 1);
}

#[test]
fn a_host_has_a_follower_beside_its_server() {
    let (manifests, all) = (named_by("hosts"), all());
    let [host] = of_kind(&manifests, "Deployment")[..] else { panic!("not one host") };
    let pod = &host["spec"]["template"]["spec"];
    let (follower, server) = (&pod["initContainers"][0], &pod["containers"][0]);
    check_command_line(&strings(&follower["args"]));
    assert_eq!(follower["restartPolicy"], "Always", "it is a sidecar");
    // The server starts once something is served.
    assert_eq!(follower["startupProbe"]["httpGet"], json!({ "path": "/ready", "port": "metrics" }));
    assert_eq!(follower["livenessProbe"]["httpGet"], json!({ "path": "/live", "port": "metrics" }));
    let listen = option(follower, "listen").rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
    assert_eq!(follower["ports"][0]["containerPort"], listen);
    let of_host = of_kind(&all, "Secret").into_iter().filter(|it| it["metadata"]["namespace"] == "ranking");
    let of_host: Vec<_> = of_host.collect();
    for file in ["api-ca", "api-token-file"] {
        is_of_a_secret(pod, follower, option(follower, file), &of_host);
    }
    let service = of_kind(&all, "Service").into_iter().find(|it| name(it) == "weighbridge-api").unwrap();
    let url = format!("https://weighbridge-api.weighbridge:{}", service["spec"]["ports"][0]["port"]);
    assert_eq!(option(follower, "api"), url);
    let models = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().unwrap();
        mounts.iter().find(|mount| mount["name"] == "models").unwrap().clone()
    };
    let (written, read) = (models(follower), models(server));
    assert!(option(follower, "into").starts_with(written["mountPath"].as_str().unwrap()));
    assert_eq!((&read["mountPath"], &read["readOnly"]), (&written["mountPath"], &true.into()));
    assert_eq!(follower["securityContext"], server["securityContext"]);
}

/// The secret that a pod's variables come from.
fn secret(pod: &Value) -> &Value {
    &pod["containers"][0]["envFrom"][0]["secretRef"]["name"]
}

#[test]
fn what_is_selected_and_referred_to_is_there() {
    let manifests = all();
    let deployments: Vec<_> = of_kind(&manifests, "Deployment");
    let labels: Vec<_> = deployments.iter().map(|it| &it["spec"]["template"]["metadata"]["labels"]).collect();
    let selects = |selector: &Value| {
        let wanted = selector.as_object().unwrap();
        labels.iter().any(|labels| wanted.iter().all(|(key, value)| &labels[key] == value))
    };
    for deployment in &deployments {
        let spec = &deployment["spec"];
        assert!(selects(&spec["selector"]["matchLabels"]));
        let pod = spec["template"]["spec"].to_string();
        for (kind, field) in [
            ("ConfigMap", "configMap\":{\"name"),
            ("Secret", "secretRef\":{\"name"),
            ("ServiceAccount", "serviceAccountName"),
        ] {
            let named = of_kind(&manifests, kind)
                .into_iter()
                .any(|it| pod.contains(&format!("{field}\":\"{}\"", name(it))));
            assert!(named, "{}: its {kind} is not there", name(deployment));
        }
    }
    for service in of_kind(&manifests, "Service") {
        assert!(selects(&service["spec"]["selector"]), "{service}");
    }
    for budget in of_kind(&manifests, "PodDisruptionBudget") {
        assert!(selects(&budget["spec"]["selector"]["matchLabels"]), "{budget}");
    }
    for policy in of_kind(&manifests, "NetworkPolicy") {
        assert!(selects(&policy["spec"]["podSelector"]["matchLabels"]), "{policy}");
    }
    for autoscaler in of_kind(&manifests, "HorizontalPodAutoscaler") {
        let target = &autoscaler["spec"]["scaleTargetRef"];
        assert!(deployments.iter().any(|it| name(it) == target["name"]), "{target}");
        let metric = &autoscaler["spec"]["metrics"][0]["external"]["metric"]["name"];
        let rules = yaml(&text("deploy/kubernetes/hpa/adapter-rules.yaml")).remove(0);
        assert_eq!(metric, &rules["externalRules"][0]["name"]["as"]);
    }
}

#[test]
fn custom_resources_name_deployments_queues_and_secrets_that_there_are() {
    let manifests = all();
    let logins = of_kind(&manifests, "TriggerAuthentication");
    let secrets = of_kind(&manifests, "Secret");
    for login in &logins {
        assert_eq!(login["apiVersion"], "keda.sh/v1alpha1");
        for reference in login["spec"]["secretTargetRef"].as_array().unwrap() {
            let secret = secrets.iter().find(|secret| name(secret) == reference["name"]).unwrap();
            assert!(secret["stringData"][reference["key"].as_str().unwrap()].is_string(), "{reference}");
        }
    }
    let scaled = of_kind(&manifests, "ScaledObject");
    let queues = |target: &str| {
        let object = scaled.iter().find(|object| object["spec"]["scaleTargetRef"]["name"] == target).unwrap();
        assert_eq!(object["apiVersion"], "keda.sh/v1alpha1");
        assert!(object["spec"]["minReplicaCount"].as_u64() < object["spec"]["maxReplicaCount"].as_u64());
        let triggers = object["spec"]["triggers"].as_array().unwrap();
        let queue = |trigger: &Value| {
            let metadata = &trigger["metadata"];
            assert_eq!(
                (&trigger["type"], &metadata["protocol"], &metadata["mode"]),
                (&json!("rabbitmq"), &json!("amqp"), &json!("QueueLength"))
            );
            assert!(metadata["value"].as_str().unwrap().parse::<u32>().unwrap() > 0);
            assert!(logins.iter().any(|login| name(login) == trigger["authenticationRef"]["name"]));
            metadata["queueName"].as_str().unwrap().to_owned()
        };
        triggers.iter().map(queue).collect::<BTreeSet<_>>()
    };
    assert_eq!(queues("weighbridge-worker"), topology::work_queues(&["", ".cpu"]));
    assert_eq!(queues("weighbridge-worker-gpu"), topology::work_queues(&[".gpu"]));
    let deployments: BTreeSet<_> = of_kind(&manifests, "Deployment").into_iter().map(name).collect();
    assert!(
        scaled
            .iter()
            .all(|object| deployments.contains(object["spec"]["scaleTargetRef"]["name"].as_str().unwrap()))
    );
}
