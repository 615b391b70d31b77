//! TLS, and certificates in place of passwords.

use weighbridge_queue::Taker;
use weighbridge_tests::certificates::Certificates;
use weighbridge_tests::rabbit::{Broker, Settings};

use crate::network::message;
use crate::site::{LONG, made, open};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_a_certificate_is_let_in_and_others_are_told_why_not() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let files = Certificates::make(folder.path(), "guest");
    let others = Certificates::make(elsewhere.path(), "guest");
    let settings = Settings { certificates: Some(files.clone()), ..Settings::default() };
    let broker = tokio::task::spawn_blocking(move || Broker::start(&settings)).await.unwrap();
    let Some(broker) = broker else { return };
    let url = broker.tls_url("tls");
    let queue = open(&url).unwrap();
    made(&*queue).await;
    queue.send(&message("secret")).await.unwrap();
    let lease = queue.lease(Taker::Cpu, LONG).await.unwrap().unwrap();
    assert_eq!(lease.message.id, "secret");
    queue.done(&lease).await.unwrap();

    let file = |path: &std::path::Path| path.display().to_string();
    let without = url.split("&certfile").next().unwrap().to_owned();
    let expired = url
        .replace(&file(&files.client), &file(&files.expired))
        .replace(&file(&files.client_key), &file(&files.expired_key));
    for (url, said) in [
        (url.replace(&file(&files.authority), &file(&others.authority)), "cacertfile"),
        (without, "certfile"),
        (expired, "how long they hold"),
        (url.replace(&file(&files.client), &file(&others.client)), "key"),
    ] {
        let error = open(&url).unwrap_err().to_string();
        println!("{said}: {error}");
        assert!(error.contains(said), "{said}: {error}");
    }
}
