//! One private broker: its folder, its ports and its processes.
//!
//! All processes are in one group, which a small shell leads. It holds the reading end of a pipe whose other end is
//! this process's alone: when this process ends, by whatever signal, the pipe ends, and the shell kills the group and
//! removes the folder. (A signal at the parent's death would not do: the kernel sends it when the *thread* ends that
//! started the child.)

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::Settings;

/// How long a broker may take to start or to stop; it takes about 9 s, and 2 s.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a broker is started that ends at once, as one does that finds its port taken.
const ATTEMPTS: usize = 4;

/// Arguments: epmd's port and the folder. epmd is started here, in the foreground, since a broker that finds none
/// starts one that outlives it. Who removes the folder has left the group.
const SUPERVISOR: &str = r#"
epmd -port "$1" -address 127.0.0.1 >"$2/epmd" 2>&1 &
cat >/dev/null
setsid sh -c 'kill -KILL -"$1"; sleep 0.2; rm -rf "$2" || { sleep 2; rm -rf "$2"; }' - $$ "$2" >/dev/null 2>&1
"#;

/// The ports of a broker.
#[derive(Debug, Clone, Copy)]
struct Ports {
    amqp: u16,
    tls: u16,
    /// Of Erlang's own protocol, for `rabbitmqctl`.
    erlang: u16,
    /// Of the daemon that knows the port of Erlang's protocol.
    epmd: u16,
}

impl Ports {
    fn free() -> Self {
        let [amqp, tls, erlang, epmd] = crate::ports::free();
        Self { amqp, tls, erlang, epmd }
    }
}

/// A broker that runs or has been stopped.
#[derive(Debug)]
pub(super) struct Node {
    programs: PathBuf,
    folder: PathBuf,
    ports: Ports,
    tls: bool,
    supervisor: Child,
    /// Erlang's virtual machine itself.
    server: Child,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

impl Node {
    /// Starts one, at other ports where those that were free have been taken since.
    #[expect(clippy::panic, reason = "only tests use it")]
    pub(super) fn start(programs: PathBuf, settings: &Settings) -> Self {
        let mut said = String::new();
        for _ in 0..ATTEMPTS {
            match Self::try_start(programs.clone(), settings) {
                Ok(node) => return node,
                Err(output) => said = output,
            }
        }
        panic!("RabbitMQ does not start; it says:\n{said}");
    }

    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    fn try_start(programs: PathBuf, settings: &Settings) -> Result<Self, String> {
        let ports = Ports::free();
        let folder = tempfile::Builder::new().prefix("rabbit").tempdir().unwrap().keep();
        write_configuration(&folder, ports, settings);
        let mut command = Command::new("sh");
        command.args(["-c", SUPERVISOR, "-", &ports.epmd.to_string()]).arg(&folder);
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut supervisor = command.spawn().unwrap();
        let started = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, ports.epmd)).is_err() {
            if started.elapsed() > PATIENCE || !matches!(supervisor.try_wait(), Ok(None)) {
                return Err(String::from("epmd does not start: is its package, erlang-base, complete?"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let server = server(&programs, &folder, ports, &supervisor);
        let tls = settings.certificates.is_some();
        let mut node = Self { programs, folder, ports, tls, supervisor, server };
        node.wait_until_ready().map(|()| node)
    }

    pub(super) fn port(&self) -> u16 {
        self.ports.amqp
    }

    pub(super) fn tls_port(&self) -> u16 {
        self.ports.tls
    }

    #[expect(clippy::expect_used, reason = "only tests use it")]
    pub(super) fn stop(&mut self) {
        kill_process(Pid::from_child(&self.server), Signal::TERM).expect("the broker runs");
        let started = Instant::now();
        while matches!(self.server.try_wait(), Ok(None)) {
            assert!(started.elapsed() < PATIENCE, "the broker does not stop");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn kill(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }

    #[expect(clippy::panic, reason = "only tests use it")]
    pub(super) fn start_again(&mut self) {
        self.kill();
        let mut said = String::new();
        for _ in 0..ATTEMPTS {
            self.server = server(&self.programs, &self.folder, self.ports, &self.supervisor);
            match self.wait_until_ready() {
                Ok(()) => return,
                Err(output) => said = output,
            }
        }
        panic!("RabbitMQ does not start again; it says:\n{said}");
    }

    #[expect(clippy::expect_used, reason = "only tests use it")]
    pub(super) fn ctl(&self, arguments: &[&str]) -> Output {
        let mut control = command(&self.programs.join("rabbitmqctl"), &self.folder, self.ports);
        control.args(arguments).stdin(Stdio::null()).output().expect("rabbitmqctl runs")
    }

    /// Waits until it takes connections. What it wrote, where it ended instead.
    #[expect(clippy::panic, reason = "only tests use it")]
    fn wait_until_ready(&mut self) -> Result<(), String> {
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if !matches!(self.server.try_wait(), Ok(None)) {
                return Err(self.said());
            }
            let tls = || !self.tls || TcpStream::connect((Ipv4Addr::LOCALHOST, self.ports.tls)).is_ok();
            if self.greets() && tls() && connects(self.ports.amqp) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("RabbitMQ takes more than {PATIENCE:?} to start; it says:\n{}", self.said());
    }

    /// Whether who listens at the port is this broker, and not one of another process that took the port. A broker says
    /// its name first.
    fn greets(&self) -> bool {
        let greeting = || {
            let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, self.ports.amqp))?;
            connection.set_read_timeout(Some(Duration::from_secs(5)))?;
            connection.write_all(b"AMQP\x00\x00\x09\x01")?;
            let mut said = vec![0; 4096];
            let mut length = 0;
            while let Some(rest @ [_, ..]) = said.get_mut(length..) {
                let count = connection.read(rest)?;
                length += count;
                // The greeting is one frame, which ends so.
                if count == 0 || said.get(length.saturating_sub(1)) == Some(&0xCE) {
                    break;
                }
            }
            said.truncate(length);
            std::io::Result::Ok(said)
        };
        let name = format!("{}@", node_name(self.ports));
        greeting().is_ok_and(|said| said.windows(name.len()).any(|window| window == name.as_bytes()))
    }

    /// The last that it wrote.
    fn said(&self) -> String {
        let output = std::fs::read(self.folder.join("output")).unwrap_or_default();
        let last = output.get(output.len().saturating_sub(8 << 10)..).unwrap_or_default();
        String::from_utf8_lossy(last).into_owned()
    }
}

/// What it is called, as far as the `@`; nobody else's is the same.
fn node_name(ports: Ports) -> String {
    format!("weighbridge-{}-{}", std::process::id(), ports.amqp)
}

/// Whether a client gets all the way.
fn connects(port: u16) -> bool {
    let connect = async {
        let url = format!("amqp://{0}:{0}@127.0.0.1:{port}/%2F", super::USER);
        let connection = lapin::Connection::connect(&url, lapin::ConnectionProperties::default()).await?;
        connection.close(200, "ready".into()).await
    };
    let in_time = async { tokio::time::timeout(Duration::from_secs(10), connect).await };
    // A thread of its own: the caller's may have a runtime.
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.is_ok_and(|runtime| matches!(runtime.block_on(in_time), Ok(Ok(()))))
        });
        client.join().unwrap_or(false)
    })
}

#[expect(clippy::unwrap_used, reason = "only tests use it")]
fn write_configuration(folder: &Path, ports: Ports, settings: &Settings) {
    for name in ["home", "log", "data", "schema"] {
        std::fs::create_dir(folder.join(name)).unwrap();
    }
    let mut configuration = format!(
        "listeners.tcp.1 = 127.0.0.1:{}\n\
         loopback_users = none\n\
         vm_memory_high_watermark.absolute = 1GiB\n\
         disk_free_limit.absolute = 50MB\n",
        ports.amqp
    );
    let (mut plugins, mut advanced) = ("[].\n", "[].\n");
    if let Some(timeout) = settings.consumer_timeout {
        configuration.push_str(&format!("consumer_timeout = {}\n", timeout.as_millis()));
        advanced = "[{rabbit, [{channel_tick_interval, 2000}]}].\n";
    }
    if let Some(files) = &settings.certificates {
        plugins = "[rabbitmq_auth_mechanism_ssl].\n";
        configuration.push_str(&format!(
            "listeners.ssl.1 = 127.0.0.1:{}\n\
             ssl_options.cacertfile = {}\n\
             ssl_options.certfile = {}\n\
             ssl_options.keyfile = {}\n\
             ssl_options.verify = verify_peer\n\
             ssl_options.fail_if_no_peer_cert = true\n\
             ssl_cert_login_from = common_name\n\
             auth_mechanisms.1 = EXTERNAL\n\
             auth_mechanisms.2 = PLAIN\n\
             auth_mechanisms.3 = AMQPLAIN\n",
            ports.tls,
            files.authority.display(),
            files.server.display(),
            files.server_key.display()
        ));
    }
    for (name, text) in
        [("rabbitmq.conf", configuration.as_str()), ("enabled", plugins), ("advanced.config", advanced)]
    {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

/// Starts the broker in the supervisor's group.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
fn server(programs: &Path, folder: &Path, ports: Ports, supervisor: &Child) -> Child {
    let output = File::create(folder.join("output")).unwrap();
    let mut command = command(&programs.join("rabbitmq-server"), folder, ports);
    // The script then becomes the virtual machine, instead of waiting for it.
    command.env("RUNNING_UNDER_SYSTEMD", "true");
    command.env(
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
        "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false +S 2:2",
    );
    command.process_group(Pid::from_child(supervisor).as_raw_nonzero().get());
    command.stdin(Stdio::null()).stderr(output.try_clone().unwrap()).stdout(output);
    command.spawn().unwrap()
}

/// A program of RabbitMQ's in the environment of this broker alone.
#[expect(clippy::disallowed_methods, reason = "programs are found by the path")]
fn command(program: &Path, folder: &Path, ports: Ports) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", std::env::var("PATH").unwrap_or_default()).env("LANG", "C.UTF-8");
    command.current_dir(folder);
    for (name, file) in [
        ("HOME", "home"),
        ("RABBITMQ_MNESIA_BASE", "data"),
        ("RABBITMQ_LOG_BASE", "log"),
        ("RABBITMQ_CONFIG_FILE", "rabbitmq.conf"),
        ("RABBITMQ_ADVANCED_CONFIG_FILE", "advanced.config"),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", "enabled"),
        ("RABBITMQ_CONF_ENV_FILE", "none"),
        ("RABBITMQ_PID_FILE", "pid"),
        ("RABBITMQ_GENERATED_CONFIG_DIR", "schema"),
        ("RABBITMQ_SCHEMA_DIR", "schema"),
    ] {
        command.env(name, folder.join(file));
    }
    for (name, value) in [
        ("RABBITMQ_NODENAME", format!("{}@localhost", node_name(ports))),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".to_owned()),
        ("RABBITMQ_NODE_PORT", ports.amqp.to_string()),
        ("RABBITMQ_DIST_PORT", ports.erlang.to_string()),
        ("ERL_EPMD_PORT", ports.epmd.to_string()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".to_owned()),
    ] {
        command.env(name, value);
    }
    command
}
