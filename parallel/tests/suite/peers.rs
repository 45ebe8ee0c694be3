//! Tests the store with peers that do not belong to the run.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nvfp4_parallel::Failure;
use nvfp4_parallel::store::{Limits, Store, StoreClient};
use nvfp4_parallel::token::Token;

const PATIENCE: Duration = Duration::from_secs(10);
/// Length of the store's greeting.
const GREETING: usize = 40;

fn token() -> Token {
    Token::new("the token of this run").unwrap()
}

fn store() -> Store {
    let limits = Limits {
        silence: PATIENCE,
        operation: PATIENCE,
    };
    Store::start("127.0.0.1:0".parse().unwrap(), token(), 2, limits).unwrap()
}

fn client(address: SocketAddr, rank: usize) -> StoreClient {
    StoreClient::connect(address, &token(), rank, PATIENCE).unwrap()
}

/// Asserts that the store still serves.
fn serves(store: &Store) {
    let began = Instant::now();
    let client = client(store.address(), 1);
    client.set("alive", b"yes").unwrap();
    assert_eq!(client.get("alive").unwrap().unwrap(), b"yes");
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "another peer held it up"
    );
    assert_eq!(store.failure(), None);
}

/// Returns true if the peer has closed the connection, after any data that it sent.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn keys_counters_and_barriers() {
    let store = store();
    let first = client(store.address(), 0);
    let address = store.address();
    let second = thread::spawn(move || {
        let second = client(address, 1);
        let seen = second.wait("late", PATIENCE).unwrap().unwrap();
        assert_eq!(second.add("count", 5).unwrap(), 12);
        second.barrier("end", 2, PATIENCE).unwrap();
        seen
    });
    assert_eq!(first.get("late").unwrap(), None);
    assert_eq!(
        first.wait("never", Duration::from_millis(50)).unwrap(),
        None
    );
    assert_eq!(first.add("count", 7).unwrap(), 7);
    first.set("late", b"value").unwrap();
    first.barrier("end", 2, PATIENCE).unwrap();
    assert_eq!(second.join().unwrap(), b"value");
    let error = first
        .barrier("alone", 2, Duration::from_millis(50))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("barrier alone") && error.contains("fewer than 2"),
        "{error}"
    );
}

#[test]
fn an_abort_ends_all_waits() {
    let store = store();
    let address = store.address();
    let waiting = thread::spawn(move || client(address, 1).wait("never", PATIENCE));
    thread::sleep(Duration::from_millis(100));
    let failure = Failure {
        rank: 0,
        doing: "reading data".into(),
        reason: "failed: no such file".into(),
    };
    client(address, 0).abort(failure.clone()).unwrap();
    let error = waiting.join().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("rank 0 failed: no such file (it was doing: reading data)"),
        "{error}"
    );
    assert_eq!(store.failure(), Some(failure));
}

#[test]
fn limits_of_keys_and_values() {
    let store = store();
    let client = client(store.address(), 0);
    assert!(client.set(&"k".repeat(257), b"").is_err());
    assert!(client.set("k", &vec![0; (64 << 10) + 1]).is_err());
    // Sixteen megabytes in total; then the store returns an error and continues.
    let full = (0..300).find_map(|index| client.set(&index.to_string(), &vec![0; 64 << 10]).err());
    let error = full.expect("memory is bounded").to_string();
    assert!(error.contains("more than 16777216 bytes"), "{error}");
    assert_eq!(client.add("n", i64::MAX).unwrap(), i64::MAX);
    let error = client.add("n", 1).unwrap_err().to_string();
    assert!(error.contains("overflows"), "{error}");
    serves(&store);
}

#[test]
fn another_token_is_refused_at_once() {
    let store = store();
    let began = Instant::now();
    let other = Token::new("the token of another run").unwrap();
    let error = StoreClient::connect(store.address(), &other, 1, PATIENCE).unwrap_err();
    assert!(error.to_string().contains("another token"), "{error}");
    assert!(began.elapsed() < PATIENCE / 2);
    // A rank out of range is disconnected after the handshake.
    let stranger = StoreClient::connect(store.address(), &token(), 2, PATIENCE).unwrap();
    assert!(stranger.get("key").is_err());
    serves(&store);
}

#[test]
fn peers_that_send_rubbish_cost_nobody_else_anything() {
    let store = store();
    let connect = || TcpStream::connect(store.address()).unwrap();
    // A handshake of zeros, an HTTP request, no data, and one byte at a time.
    let mut zeros = connect();
    zeros.write_all(&[0; 76]).unwrap();
    assert!(is_closed(&zeros));
    let mut http = connect();
    http.write_all(
        b"GET / HTTP/1.1\r\nHost: store\r\nUser-Agent: a browser of some kind here\r\n\r\n",
    )
    .unwrap();
    let silent: Vec<_> = (0..20).map(|_| connect()).collect();
    let mut slow = connect();
    slow.write_all(b"n").unwrap();
    serves(&store);
    assert!(is_closed(&http));
    drop(silent);
}

/// A recorded handshake cannot be replayed: the random numbers are new.
#[test]
fn a_replayed_handshake_is_refused() {
    let store = store();
    // A proxy between a client and the store, which records the client's data.
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap();
    let honest = thread::spawn(move || StoreClient::connect(address, &token(), 1, PATIENCE));
    let (mut from_client, _) = proxy.accept().unwrap();
    let mut to_store = TcpStream::connect(store.address()).unwrap();
    let mut greeting = [0; GREETING];
    to_store.read_exact(&mut greeting).unwrap();
    from_client.write_all(&greeting).unwrap();
    let mut answer = [0; 76];
    from_client.read_exact(&mut answer).unwrap();
    to_store.write_all(&answer).unwrap();
    let mut verdict = [0; 33];
    to_store.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict[0], 1);
    from_client.write_all(&verdict).unwrap();
    honest.join().unwrap().unwrap();

    let mut replay = TcpStream::connect(store.address()).unwrap();
    replay.read_exact(&mut greeting).unwrap();
    replay.write_all(&answer).unwrap();
    replay.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict, [0; 33]);
    assert!(is_closed(&replay));
    // A server that does not know the token cannot impersonate the store: the client checks its
    // answer too.
    let honest = thread::spawn(move || StoreClient::connect(address, &token(), 1, PATIENCE));
    let (mut from_client, _) = proxy.accept().unwrap();
    from_client.write_all(&greeting).unwrap();
    from_client.read_exact(&mut answer).unwrap();
    from_client.write_all(&[1; 33]).unwrap();
    let error = honest.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("does not know the token"), "{error}");
    serves(&store);
}

/// After the handshake: messages that are too long, truncated, or invalid.
#[test]
fn malformed_messages_of_a_rank_end_its_connection() {
    let store = store();
    let frames: [&[u8]; 4] = [
        &[255, 255, 255, 255, 0],
        &[1, 0, 0, 0, 77],
        &[0, 0, 0, 0],
        &[6, 0, 0, 0, 1, 200, 0, 0, 0, 0],
    ];
    for frame in frames {
        let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = proxy.local_addr().unwrap();
        let honest = thread::spawn(move || StoreClient::connect(address, &token(), 1, PATIENCE));
        let (mut from_client, _) = proxy.accept().unwrap();
        let mut to_store = TcpStream::connect(store.address()).unwrap();
        let mut greeting = [0; GREETING];
        to_store.read_exact(&mut greeting).unwrap();
        from_client.write_all(&greeting).unwrap();
        let mut answer = [0; 76];
        from_client.read_exact(&mut answer).unwrap();
        to_store.write_all(&answer).unwrap();
        let mut verdict = [0; 33];
        to_store.read_exact(&mut verdict).unwrap();
        from_client.write_all(&verdict).unwrap();
        honest.join().unwrap().unwrap();
        // The connection is authenticated, but the following data is not a message.
        to_store.write_all(frame).unwrap();
        assert!(is_closed(&to_store), "{frame:?}");
    }
    serves(&store);
}
