//! `serve`: all that one machine needs, in one process.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::Context;
use super::api::ServerOptions;
use super::drop::SpoolOption;
use super::worker::{PATIENCE, WorkOptions, told_to_stop};
use crate::config::DEFAULT_LISTEN;
use crate::error::{Failure, Result};
use crate::soak;
use crate::worker::Stop;

/// Run all that one machine needs, in one process, until told to stop: workers, whoever sends what waits in the
/// spool, the upkeep of channels, and the API that serving hosts, trainers and operators ask.
///
/// Without --tokens the API answers this machine alone, and lets everybody on it do everything.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weighbridge serve --store /srv/store --queue embedded:/srv/queue\n  \
                  weighbridge serve --roles api --store s3://models/weighbridge --api-listen 0.0.0.0:7461 \\\n    \
                  --tokens tokens.toml --tls-certificate server.pem --tls-key server.key")]
pub(super) struct Serve {
    #[command(flatten)]
    work: WorkOptions,
    /// What runs.
    #[arg(long, value_delimiter = ',', default_values = ["worker", "spool", "upkeep", "api"], value_name = "ROLES")]
    roles: Vec<Role>,
    /// How often channels are looked at for what has stood long enough to be promoted, in seconds.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    upkeep_seconds: u64,
    #[command(flatten)]
    spool: SpoolOption,
    #[command(flatten)]
    api: ServerOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Publishes what is on the queue.
    Worker,
    /// Sends what waits in the spool.
    Spool,
    /// Promotes what has stood on a channel for as long as its model's policy says.
    Upkeep,
    /// Answers serving hosts, trainers and operators: gRPC and HTTP.
    Api,
}

impl Serve {
    pub(super) async fn run(self, context: &Context) -> Result<()> {
        let stop = told_to_stop(context);
        let has = |role| self.roles.contains(&role);
        // What is wrong with the API's options is said before anything begins.
        let api = if has(Role::Api) { Some(self.api.take(context).await?) } else { None };
        let opened = if has(Role::Worker) || has(Role::Api) {
            let listen = self.work.listen(context).unwrap_or(DEFAULT_LISTEN);
            Some(self.work.open(context, Some(listen), &stop).await?)
        } else {
            None
        };
        let spool = async {
            if !has(Role::Spool) {
                return Ok(());
            }
            let (spool, queue) = (self.spool.open(context)?, context.queue_patiently(PATIENCE).await?);
            let mut stop = stop.clone();
            spool.follow(&*queue, stop.wait()).await.map(drop).map_err(Failure::from)
        };
        let work = async {
            match &opened {
                Some(opened) if has(Role::Worker) => {
                    self.work.work(context, opened.clone(), false, stop.clone()).await
                }
                _ => Ok(()),
            }
        };
        let api = async {
            match (api, &opened) {
                (Some(api), Some(opened)) => api.answer(opened, stop.clone()).await,
                _ => Ok(()),
            }
        };
        tokio::try_join!(spool, work, api, self.upkeep(context, stop.clone())).map(drop)
    }

    /// Looks at channels again and again. What fails is told, and tried the next time.
    async fn upkeep(&self, context: &Context, mut stop: Stop) -> Result<()> {
        if !self.roles.contains(&Role::Upkeep) {
            return Ok(());
        }
        let root = self.work.root(context)?;
        loop {
            if let Err(error) = soak::tick(&root).await {
                tracing::warn!(%error, "channels cannot be looked at");
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(self.upkeep_seconds)) => {}
                () = stop.wait() => return Ok(()),
            }
        }
    }
}
