//! `queue status`: what waits to be published.

use clap::Subcommand;
use serde_json::json;

use weighbridge_queue::Depth;
use weighbridge_queue::message::Priority;
use weighbridge_queue::url;
use weighbridge_schemas::error::Kind;

use super::Context;
use super::output::{ago, table};
use crate::error::{Exit, Failure, Result};

/// Look at the queue.
#[derive(Debug, Subcommand)]
pub(super) enum Queue {
    /// Show how many messages are on the queue, by class: a manifest, a part of a checkpoint and each other step of a
    /// job is a message.
    ///
    /// Ready ones can be taken, delayed ones wait to be tried again, leased ones are being worked on. A queue that
    /// is not there yet is not made. A broker does not tell what others have in hand, nor how old messages are: there,
    /// leased is 0, and the oldest is not known.
    #[command(after_help = "Example:\n  weighbridge queue status --queue embedded:/srv/queue")]
    Status,
}

impl Queue {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        match self {
            Self::Status => status(context).await,
        }
    }
}

async fn status(context: &Context) -> Result<()> {
    if !context.open_queue(url::is_there).await? {
        let message = "there is no queue yet: `weighbridge drop`, a worker or `weighbridge serve` makes it; or name \
                       another with --queue";
        return Err(Failure {
            kind: Kind::Permanent,
            class: "not_found",
            message: message.to_owned(),
            exit: Exit::NotFound,
        });
    }
    let depth = context.queue().await?.depth().await?;
    let sum = |of: fn(&Depth) -> u64| depth.iter().map(of).sum::<u64>();
    let oldest = depth.iter().filter_map(|class| class.oldest).max();
    let classes: Vec<_> = depth
        .iter()
        .map(|class| {
            json!({
                "class": name(class.priority),
                "ready": class.ready,
                "delayed": class.delayed,
                "leased": class.leased,
                "oldest_seconds": class.oldest.map(|oldest| oldest.as_secs_f64()),
            })
        })
        .collect();
    let document = json!({
        "ready": sum(|class| class.ready),
        "delayed": sum(|class| class.delayed),
        "leased": sum(|class| class.leased),
        "oldest_seconds": oldest.map(|oldest| oldest.as_secs_f64()),
        "classes": classes,
    });
    context.output.listing(&document, || {
        let row = |class: &Depth| {
            vec![
                name(class.priority).to_owned(),
                class.ready.to_string(),
                class.delayed.to_string(),
                class.leased.to_string(),
                class.oldest.map_or("-".to_owned(), ago),
            ]
        };
        table(&["class", "ready", "delayed", "leased", "oldest"], &depth.iter().map(row).collect::<Vec<_>>())
    });
    Ok(())
}

fn name(class: Priority) -> &'static str {
    match class {
        Priority::High => "high",
        Priority::Normal => "normal",
        Priority::Low => "low",
    }
}
