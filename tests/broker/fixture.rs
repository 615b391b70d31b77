//! The broker and the proxy that the other tests rest on do what they say.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use weighbridge_tests::certificates::Certificates;
use weighbridge_tests::proxy::Proxy;
use weighbridge_tests::rabbit::{Broker, Settings};

/// A channel with confirms, and the durable queue `name`.
async fn channel(connection: &Connection, name: &str) -> Channel {
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    channel.queue_declare(name.into(), QueueDeclareOptions::durable(), arguments).await.unwrap();
    channel
}

async fn publish(channel: &Channel, name: &str, body: &[u8]) {
    let properties = BasicProperties::default().with_delivery_mode(2);
    let options = BasicPublishOptions::default();
    let confirm = channel.basic_publish("".into(), name.into(), options, body, properties).await.unwrap();
    assert!(matches!(confirm.await.unwrap(), Confirmation::Ack(_)));
}

/// The next message of the queue, once it has a leader.
async fn next(channel: &Channel, name: &str) -> Vec<u8> {
    for _ in 0..100 {
        let got = channel.basic_get(name.into(), BasicGetOptions { no_ack: true }).await.unwrap();
        if let Some(message) = got {
            return message.delivery.data;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{name} holds nothing");
}

async fn connect(url: &str) -> Connection {
    Connection::connect(url, ConnectionProperties::default()).await.unwrap()
}

#[tokio::test]
async fn all_share_one_broker() {
    let (Some(one), Some(other)) = (Broker::shared(), Broker::shared()) else { return };
    assert_eq!(one.port(), other.port());
    let connection = connect(&one.url("fixture")).await;
    let channel = channel(&connection, "fixture-shared").await;
    publish(&channel, "fixture-shared", b"hello").await;
    assert_eq!(next(&channel, "fixture-shared").await, b"hello");
}

#[tokio::test]
async fn what_was_confirmed_outlives_a_kill_and_a_stop() {
    let settings = Settings { consumer_timeout: Some(Duration::from_secs(6)), ..Settings::default() };
    let Some(mut broker) = Broker::start(&settings) else { return };
    let connection = connect(&broker.url("fixture")).await;
    let first = channel(&connection, "kept").await;
    publish(&first, "kept", b"one").await;
    publish(&first, "kept", b"two").await;
    broker.settle();
    publish(&first, "kept", b"three").await;
    broker.kill();
    let refused = TcpStream::connect(broker.address()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    broker.start_again();
    let second = channel(&connect(&broker.url("fixture")).await, "kept").await;
    assert_eq!(next(&second, "kept").await, b"one");
    broker.stop();
    assert!(TcpStream::connect(broker.address()).is_err());
    broker.start_again();
    let third = channel(&connect(&broker.url("fixture")).await, "kept").await;
    assert_eq!(next(&third, "kept").await, b"two");
    assert_eq!(next(&third, "kept").await, b"three");
    let done = broker.ctl(&["eval", "application:get_env(rabbit, consumer_timeout)."]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "{ok,6000}");
}

#[tokio::test]
async fn a_certificate_stands_for_a_user() {
    let folder = tempfile::tempdir().unwrap();
    let files = Certificates::make(folder.path(), "trainer");
    let settings = Settings { certificates: Some(files.clone()), ..Settings::default() };
    let Some(broker) = Broker::start(&settings) else { return };
    for arguments in
        [&["add_user", "trainer", "unused"][..], &["set_permissions", "trainer", ".*", ".*", ".*"]]
    {
        let done = broker.ctl(arguments);
        assert!(done.status.success(), "{done:?}");
    }
    let url = broker.tls_url("fixture");
    let authority = std::fs::read_to_string(&files.authority).unwrap();
    let identity = OwnedIdentity::PKCS8 {
        pem: std::fs::read(&files.client).unwrap(),
        key: std::fs::read(&files.client_key).unwrap(),
    };
    let attempt = async |identity| {
        let tls = OwnedTLSConfig { identity, cert_chain: Some(authority.clone()) };
        let runtime = lapin::runtime::default_runtime().unwrap();
        Connection::connect_with_config(&url, ConnectionProperties::default(), tls, runtime).await
    };
    let connection = attempt(Some(identity)).await.unwrap();
    let channel = channel(&connection, "secret").await;
    publish(&channel, "secret", b"hello").await;
    assert_eq!(next(&channel, "secret").await, b"hello");
    assert!(attempt(None).await.is_err(), "a client without a certificate is let in");
}

#[tokio::test]
async fn a_broker_is_reached_through_a_proxy() {
    let Some(broker) = Broker::shared() else { return };
    let proxy = Proxy::start(broker.address());
    let connection = connect(&broker.url_through(&proxy, "fixture")).await;
    let channel = channel(&connection, "fixture-proxy").await;
    publish(&channel, "fixture-proxy", b"hello").await;
    assert_eq!(proxy.accepted(), 1);
    proxy.cut();
    let lost = channel.basic_get("fixture-proxy".into(), BasicGetOptions { no_ack: true }).await;
    assert!(lost.is_err(), "{lost:?}");
}

/// A server that says back what it hears.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut client.try_clone().unwrap(), &mut &client);
                let _ = client.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    address
}

fn client(proxy: &Proxy) -> TcpStream {
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    client
}

fn hears(mut client: &TcpStream, said: &[u8]) {
    let mut heard = vec![0; said.len()];
    client.read_exact(&mut heard).unwrap();
    assert_eq!(heard, said);
}

fn says_and_hears(mut client: &TcpStream, said: &[u8]) {
    client.write_all(said).unwrap();
    hears(client, said);
}

/// Whether nothing can be read for a while.
fn is_silent(mut client: &TcpStream) -> bool {
    client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let error = client.read(&mut [0]).unwrap_err();
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    error.kind() == ErrorKind::WouldBlock
}

/// All that can be read before the connection ends in whatever way.
fn rest(mut client: &TcpStream) -> Vec<u8> {
    let mut heard = Vec::new();
    let _ = client.read_to_end(&mut heard);
    heard
}

fn waits_until(holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(30), "it does not come to hold");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_proxy_passes_on_all_that_is_said_and_the_ends() {
    let proxy = Proxy::start(echo());
    let mut one = client(&proxy);
    let other = client(&proxy);
    says_and_hears(&one, b"hello");
    says_and_hears(&other, b"you");
    assert_eq!((proxy.accepted(), proxy.open()), (2, 2));
    let said: Vec<u8> = (0..1_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| (&one).write_all(&said).unwrap());
        hears(&one, &said);
    });
    one.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(one.read(&mut [0]).unwrap(), 0);
    drop(other);
    waits_until(|| proxy.open() == 0);
}

#[test]
fn dropped_packets_come_late_or_never() {
    let proxy = Proxy::start(echo());
    let mut old = client(&proxy);
    says_and_hears(&old, b"hello");
    proxy.drop_packets();
    old.write_all(b"lost?").unwrap();
    let mut new = client(&proxy);
    new.write_all(b"new").unwrap();
    assert!(is_silent(&old) && is_silent(&new));
    waits_until(|| proxy.open() == 2);
    proxy.pass();
    hears(&old, b"lost?");
    hears(&new, b"new");
    proxy.drop_packets();
    old.write_all(b"never").unwrap();
    proxy.cut();
    assert_eq!(rest(&old), b"");
}

#[test]
fn a_cut_resets_all_that_are_connected() {
    let proxy = Proxy::start(echo());
    let mut one = client(&proxy);
    says_and_hears(&one, b"hello");
    proxy.cut();
    assert_eq!(one.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    waits_until(|| proxy.open() == 0);
    says_and_hears(&client(&proxy), b"again");
    drop(proxy);
}

#[test]
fn a_proxy_refuses_until_it_accepts() {
    let proxy = Proxy::start(echo());
    let old = client(&proxy);
    says_and_hears(&old, b"hello");
    proxy.refuse();
    assert_eq!(rest(&client(&proxy)), b"");
    waits_until(|| proxy.refused() == 1);
    says_and_hears(&old, b"still here");
    proxy.accept();
    says_and_hears(&client(&proxy), b"again");
    assert_eq!(proxy.accepted(), 2);
}

#[test]
fn a_connection_is_cut_after_so_many_bytes() {
    let proxy = Proxy::start(echo());
    let one = client(&proxy);
    says_and_hears(&one, b"hello");
    proxy.cut_after_bytes_down(6);
    says_and_hears(&one, b"four");
    (&one).write_all(b"more").unwrap();
    assert_eq!(rest(&one), b"mo");
    let other = client(&proxy);
    says_and_hears(&other, b"it happens once");
    proxy.cut_after_bytes_up(0);
    (&other).write_all(b"lost").unwrap();
    assert_eq!(rest(&other), b"");
    waits_until(|| proxy.open() == 0);
}

#[test]
fn a_delay_holds_in_both_directions() {
    let proxy = Proxy::start(echo());
    let one = client(&proxy);
    says_and_hears(&one, b"hello");
    proxy.delay(Duration::from_millis(200));
    let started = Instant::now();
    says_and_hears(&one, b"late");
    assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
}
