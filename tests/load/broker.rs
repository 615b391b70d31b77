//! What handing over through a broker takes, beside what the same broker does for a bare client in the same run, and
//! beside a queue in a folder.
//!
//! A private RabbitMQ of this machine, one node, on the loopback interface: what a network and more nodes add is not in
//! these figures.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::task::JoinSet;
use tokio::time::sleep;

use weighbridge_queue::clock::SystemClock;
use weighbridge_queue::message::{Device, Kind, Message, Priority};
use weighbridge_queue::{Queue, Taker, url};
use weighbridge_tests::rabbit::{Broker, Settings};

use crate::Failure;
use crate::report::machine;

/// Bytes of a message: a checkpoint manifest's.
const BODY: usize = 2048;
/// Messages of each measurement.
const MESSAGES: usize = 2000;
/// Messages whose way is timed.
const TIMED: usize = 100;
/// Who sends, or takes, at the same time.
const AT_ONCE: usize = 8;
/// How long an idle worker pauses between looks, at most.
const PAUSE: Duration = Duration::from_millis(250);
/// For how long a message is taken.
const LEASE: Duration = Duration::from_secs(60);
/// What a bare client uses.
const BARE: &str = "bare";

/// Measures; gives the tables.
pub(crate) fn measure(folder: &Path) -> Result<String, Failure> {
    let broker = Broker::start(&Settings::default()).ok_or("there is no RabbitMQ here")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let embedded = |name: &str| format!("embedded:{}", folder.join(name).display());
    let open = |url: &str| url::open(url, Arc::new(SystemClock::new()));
    let (mut lines, mut rows) = (vec![machine(), String::new()], Vec::new());
    runtime.block_on(async {
        rows.push(bare(&broker).await?);
        for (name, url) in [("amqp", broker.url("rates")), ("embedded", embedded("rates"))] {
            rows.push(queue(name, open(&url)?).await?);
        }
        let head = ["messages a second", "sent one by one", "sent by 8", "taken and done one by one", "by 8"];
        lines.extend(table(&head, &rows));
        rows.clear();
        for (name, url) in [("amqp", broker.url("way")), ("embedded", embedded("way"))] {
            rows.push(row(name, &timed(open(&url)?, open(&url)?).await?));
        }
        lines.push(String::new());
        lines.extend(table(
            &["from sent to leased by an idle worker", "median ms", "p99 ms", "longest ms"],
            &rows,
        ));
        Ok::<_, Failure>(())
    })?;
    Ok(lines.join("\n"))
}

fn table(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let line = |cells: &[String]| format!("| {} |", cells.join(" | "));
    let head: Vec<String> = head.iter().map(ToString::to_string).collect();
    let rule = format!("|{}", "---|".repeat(head.len()));
    [line(&head), rule].into_iter().chain(rows.iter().map(|row| line(row))).collect()
}

fn message(number: usize) -> Message {
    Message {
        id: format!("message {number}"),
        kind: Kind::Checkpoint,
        body: vec![b'x'; BODY],
        priority: Priority::Normal,
        device: Device::Any,
    }
}

/// Runs `work` for all messages, by so many at once; gives messages a second.
async fn rate<W, F>(at_once: usize, work: W) -> Result<String, Failure>
where
    W: Fn(usize) -> F + Clone + Send + 'static,
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for from in 0..at_once {
        let work = work.clone();
        tasks.spawn(async move {
            for number in (from..MESSAGES).step_by(at_once) {
                work(number).await?;
            }
            Ok::<_, String>(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let messages = MESSAGES as f64;
    Ok(format!("{:.0}", messages / started.elapsed().as_secs_f64()))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A queue of ours.
async fn queue(name: &str, queue: Arc<dyn Queue>) -> Result<Vec<String>, Failure> {
    let (to_send, to_take) = (Arc::clone(&queue), queue);
    let send = move |number| {
        let queue = Arc::clone(&to_send);
        async move { queue.send(&message(number)).await.map_err(text) }
    };
    let take = move |_| {
        let queue = Arc::clone(&to_take);
        async move {
            let lease = queue.lease(Taker::Cpu, LEASE).await.map_err(text)?.ok_or("a message is gone")?;
            queue.done(&lease).await.map_err(text)
        }
    };
    row_of(name, send, take).await
}

async fn row_of<S, T, A, B>(name: &str, send: S, take: T) -> Result<Vec<String>, Failure>
where
    S: Fn(usize) -> A + Clone + Send + 'static,
    T: Fn(usize) -> B + Clone + Send + 'static,
    A: Future<Output = Result<(), String>> + Send + 'static,
    B: Future<Output = Result<(), String>> + Send + 'static,
{
    let one = rate(1, send.clone()).await?;
    let taken_one = rate(1, take.clone()).await?;
    let many = rate(AT_ONCE, send).await?;
    let taken_many = rate(AT_ONCE, take).await?;
    Ok(vec![name.to_owned(), one, many, taken_one, taken_many])
}

/// A bare client: a quorum queue, confirms one by one, `basic.get` and `basic.ack`; a channel for each who works.
async fn bare(broker: &Broker) -> Result<Vec<String>, Failure> {
    let connection = Connection::connect(&broker.url(BARE), ConnectionProperties::default()).await?;
    let mut channels = Vec::new();
    for _ in 0..AT_ONCE {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        channels.push(channel);
    }
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channels[0].queue_declare(BARE.into(), options, arguments).await?;
    let channels: Arc<Vec<Channel>> = Arc::new(channels);
    let (to_send, to_take) = (Arc::clone(&channels), channels);
    let send = move |number: usize| {
        let channel = to_send[number % AT_ONCE].clone();
        async move {
            let properties = BasicProperties::default().with_delivery_mode(2);
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let sent =
                channel.basic_publish("".into(), BARE.into(), options, &[b'x'; BODY], properties).await;
            sent.map_err(text)?.await.map(drop).map_err(text)
        }
    };
    let take = move |number: usize| {
        let channel = to_take[number % AT_ONCE].clone();
        async move {
            let taken = channel.basic_get(BARE.into(), BasicGetOptions::default()).await.map_err(text)?;
            let taken = taken.ok_or("a message is gone")?;
            taken.delivery.ack(BasicAckOptions::default()).await.map(drop).map_err(text)
        }
    };
    row_of("the broker, by a bare client", send, take).await
}

/// How long it takes from a call that sends until somebody idle has the message, who looks as an idle worker does.
async fn timed(sender: Arc<dyn Queue>, worker: Arc<dyn Queue>) -> Result<Vec<Duration>, Failure> {
    let (tell, mut told) = tokio::sync::mpsc::channel(1);
    let looking = tokio::spawn(async move {
        for _ in 0..TIMED {
            let mut pause = Duration::from_millis(10);
            let lease = loop {
                if let Some(lease) = worker.lease(Taker::Cpu, LEASE).await.map_err(text)? {
                    break lease;
                }
                pause = (pause * 2).min(PAUSE);
                sleep(pause).await;
            };
            tell.send(Instant::now()).await.map_err(text)?;
            worker.done(&lease).await.map_err(text)?;
        }
        Ok::<_, String>(())
    });
    let mut times = Vec::new();
    for number in 0..TIMED {
        // At every moment of an idle worker's pause.
        sleep(Duration::from_millis(600 + (number as u64 * 97) % 250)).await;
        let sent = Instant::now();
        sender.send(&message(number)).await?;
        times.push(told.recv().await.ok_or("the worker is gone")?.duration_since(sent));
    }
    looking.await??;
    times.sort();
    Ok(times)
}

fn row(name: &str, times: &[Duration]) -> Vec<String> {
    let at = |of_a_hundred: usize| format!("{}", times[(times.len() - 1) * of_a_hundred / 100].as_millis());
    vec![name.to_owned(), at(50), at(99), at(100)]
}
