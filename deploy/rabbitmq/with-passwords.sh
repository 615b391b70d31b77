#!/bin/sh
# Writes definitions to standard output in which the users have passwords: those that lie in FOLDER, a file a user, named
# as the user is. Who has no file there keeps what the definitions say: no password, and so no login.
#
#   with-passwords.sh definitions.json FOLDER > somewhere-safe.json
#
# It needs nothing but a shell and coreutils. What it writes lets nobody log in who does not know the passwords, but
# whoever reads it can try passwords at leisure: keep it from others.
set -eu

definitions=$1
folder=$2

# The bytes that a line of hexadecimal digits stands for.
bytes() {
    while read -r first second; do
        # Bytes are written as octal escapes, which every printf knows.
        printf "\\$(printf %03o "0x$first$second")"
    done
}

pairs() {
    sed 's/\(.\)\(.\)/\1 \2\n/g' | sed '/^$/d'
}

# As RabbitMQ's rabbit_password_hashing_sha256: four bytes of salt, and the SHA-256 of salt and password.
hash_of() {
    salt=$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')
    # A line's end behind the password is the editor's, not the password's.
    digest=$({ printf %s "$salt" | pairs | bytes; printf %s "$(cat "$1")"; } | sha256sum | cut -d' ' -f1)
    printf %s "$salt$digest" | pairs | bytes | base64 | tr -d '\n'
}

script=
for file in "$folder"/*; do
    user=$(basename "$file")
    if ! grep -q "\"name\": \"$user\", \"password_hash\"" "$definitions"; then
        continue
    fi
    if [ -z "$(cat "$file")" ]; then
        echo "with-passwords.sh: $file: an empty password: write one into it, or remove the file" >&2
        exit 1
    fi
    script="$script
s|\(\"name\": \"$user\", \"password_hash\": \"\)[^\"]*|\1$(hash_of "$file")|"
done
if [ -z "$script" ]; then
    echo "with-passwords.sh: $folder: no file is named as a user of $definitions is" >&2
    exit 1
fi
sed "$script" "$definitions"
