// A client that makes many calls at once with grpc-go, and counts those that end otherwise than they should.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// raw passes messages on as bytes.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                               { return "proto" }

func main() {
	address := flag.String("address", "", "HOST:PORT")
	window := flag.Int("window", 0, "bytes of windows; 0 measures the bandwidth with pings")
	echo := flag.String("echo", "", "method that answers with the message")
	sleep := flag.String("sleep", "", "method that does not answer")
	calls := flag.Int("calls", 500, "calls of each of 8 goroutines")
	flag.Parse()
	options := []grpc.DialOption{grpc.WithInsecure(), grpc.WithBlock(),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(1<<30))}
	if *window > 0 {
		options = append(options, grpc.WithInitialWindowSize(int32(*window)), grpc.WithInitialConnWindowSize(int32(*window)))
	}
	connection, err := grpc.Dial(*address, options...)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	var good, bad int64
	var group sync.WaitGroup
	for worker := 0; worker < 8; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for number := 0; number < *calls; number++ {
				if err := call(connection, *echo, *sleep, worker, number); err != nil {
					atomic.AddInt64(&bad, 1)
					log.Print(err)
				} else {
					atomic.AddInt64(&good, 1)
				}
			}
		}(worker)
	}
	group.Wait()
	fmt.Println("good:", good, "bad:", bad)
}

// call makes one call: each has another deadline, the fiftieth a large message, the seventieth one that passes.
func call(connection *grpc.ClientConn, echo, sleep string, worker, number int) error {
	timeout := 30*time.Second + time.Duration(worker*1_000_003+number*1009)*time.Microsecond
	size := number % 1000
	if number%50 == 49 {
		size = 3_000_000
	}
	late := number%70 == 69
	method := echo
	if late {
		method, timeout = sleep, time.Duration(1+number%7)*time.Millisecond
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	sent, received := bytes.Repeat([]byte{byte(number)}, size), []byte(nil)
	err := connection.Invoke(ctx, method, &sent, &received)
	// grpc-go itself repeats a call that was not sent, as its connection drains, once only.
	for tries := 0; tries < 5 && status.Convert(err).Message() == "the connection is draining"; tries++ {
		err = connection.Invoke(ctx, method, &sent, &received)
	}
	if late {
		if status.Code(err) != codes.DeadlineExceeded {
			return fmt.Errorf("a call of %s ended with %v", timeout, err)
		}
		return nil
	}
	if err == nil && !bytes.Equal(sent, received) {
		err = fmt.Errorf("%d bytes came back as %d", len(sent), len(received))
	}
	return err
}
