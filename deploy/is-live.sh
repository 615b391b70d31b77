#!/bin/bash
# Whether the worker of this container is live: is-live.sh PORT. Its exit code is 0 where /live says 200, else 1.
# It needs bash and nothing else, since the image has no HTTP client.
set -u

{ exec 3<> "/dev/tcp/127.0.0.1/$1"; } 2> /dev/null || exit 1
printf 'GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
# The status line is `HTTP/1.1 200 OK`.
read -r -t 4 -u 3 _ status _ || exit 1
[ "$status" = 200 ]
