// A client of conch in Go: unary and streamed inference, model control, TLS and shared memory.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"conch/inference"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

const (
	usage = "usage: client [--address HOST:PORT] [--root-cert FILE] " +
		"unary | stream | load MODEL | unload MODEL | shared-memory"
	timeout = 30 * time.Second
	count   = 16 // elements of each tensor of the model `simple`
	size    = 4 * count
)

type client = inference.GRPCInferenceServiceClient

// unary sends one request and prints the sum of its two vectors.
func unary(ctx context.Context, conch client) error {
	request := &inference.ModelInferRequest{ModelName: "simple", Inputs: inputs(), RawInputContents: vectors()}
	response, err := conch.ModelInfer(ctx, request)
	if err != nil {
		return err
	}
	for place, output := range response.Outputs {
		if output.Name == "OUTPUT0" {
			fmt.Println("unary:", numbers(response.RawOutputContents[place]))
		}
	}
	return nil
}

// stream has a decoupled model write text, and prints each word as it comes.
func stream(ctx context.Context, conch client) error {
	exchange, err := conch.ModelStreamInfer(ctx)
	if err != nil {
		return err
	}
	prompt, words := "A", int32(5)
	request := &inference.ModelInferRequest{
		ModelName: "word_chain",
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			{Name: "prompt", Datatype: "BYTES", Shape: []int64{1}},
			{Name: "max_words", Datatype: "INT32", Shape: []int64{1}},
		},
		RawInputContents: [][]byte{append(raw(uint32(len(prompt))), prompt...), raw(words)},
	}
	// After io.EOF, Recv returns the reason.
	if err := exchange.Send(request); err != nil && err != io.EOF {
		return err
	}
	// The server ends the stream after the last response.
	if err := exchange.CloseSend(); err != nil {
		return err
	}
	for {
		message, err := exchange.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if message.ErrorMessage != "" {
			return errors.New(message.ErrorMessage)
		}
		fmt.Printf("stream: %s\n", message.InferResponse.RawOutputContents[0][4:])
	}
}

// load loads a model, or loads it again.
func load(ctx context.Context, conch client, model string) error {
	_, err := conch.RepositoryModelLoad(ctx, &inference.RepositoryModelLoadRequest{ModelName: model})
	if err != nil {
		return err
	}
	return printReady(ctx, conch, "load", model)
}

// unload unloads a model.
func unload(ctx context.Context, conch client, model string) error {
	_, err := conch.RepositoryModelUnload(ctx, &inference.RepositoryModelUnloadRequest{ModelName: model})
	if err != nil {
		return err
	}
	return printReady(ctx, conch, "unload", model)
}

func printReady(ctx context.Context, conch client, command, model string) error {
	response, err := conch.ModelReady(ctx, &inference.ModelReadyRequest{Name: model})
	if err != nil {
		return err
	}
	state := "not ready"
	if response.Ready {
		state = "ready"
	}
	fmt.Printf("%s: %s is %s\n", command, model, state)
	return nil
}

// sharedMemory does as unary, with all tensors in a region of system shared memory: two inputs, then the output.
func sharedMemory(ctx context.Context, conch client) error {
	name := fmt.Sprintf("client-go-%d", os.Getpid())
	path := "/dev/shm/" + name
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer os.Remove(path)
	defer file.Close()
	if err := file.Truncate(3 * size); err != nil {
		return err
	}
	memory, err := syscall.Mmap(int(file.Fd()), 0, 3*size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	defer syscall.Munmap(memory)
	registration := &inference.SystemSharedMemoryRegisterRequest{Name: name, Key: "/" + name, ByteSize: 3 * size}
	if _, err := conch.SystemSharedMemoryRegister(ctx, registration); err != nil {
		return err
	}
	defer conch.SystemSharedMemoryUnregister(ctx, &inference.SystemSharedMemoryUnregisterRequest{Name: name})

	request := &inference.ModelInferRequest{ModelName: "simple", Inputs: inputs()}
	for place, vector := range vectors() {
		copy(memory[place*size:], vector)
		request.Inputs[place].Parameters = region(name, int64(place*size))
	}
	request.Outputs = []*inference.ModelInferRequest_InferRequestedOutputTensor{
		{Name: "OUTPUT0", Parameters: region(name, 2*size)},
	}
	if _, err := conch.ModelInfer(ctx, request); err != nil {
		return err
	}
	fmt.Println("shared-memory:", numbers(memory[2*size:]))
	return nil
}

func inputs() []*inference.ModelInferRequest_InferInputTensor {
	return []*inference.ModelInferRequest_InferInputTensor{
		{Name: "INPUT0", Datatype: "INT32", Shape: []int64{1, count}},
		{Name: "INPUT1", Datatype: "INT32", Shape: []int64{1, count}},
	}
}

// vectors returns 0 to 15, and ones.
func vectors() [][]byte {
	var counted, ones [count]int32
	for place := range counted {
		counted[place], ones[place] = int32(place), 1
	}
	return [][]byte{raw(counted), raw(ones)}
}

func region(name string, offset int64) map[string]*inference.InferParameter {
	number := func(value int64) *inference.InferParameter {
		return &inference.InferParameter{ParameterChoice: &inference.InferParameter_Int64Param{Int64Param: value}}
	}
	text := &inference.InferParameter{ParameterChoice: &inference.InferParameter_StringParam{StringParam: name}}
	return map[string]*inference.InferParameter{
		"shared_memory_region":    text,
		"shared_memory_offset":    number(offset),
		"shared_memory_byte_size": number(size),
	}
}

// raw returns numbers as the protocol has them: little-endian.
func raw(value interface{}) []byte {
	var buffer bytes.Buffer
	binary.Write(&buffer, binary.LittleEndian, value) // never fails for numbers and a buffer
	return buffer.Bytes()
}

func numbers(raw []byte) string {
	values := make([]int32, len(raw)/4)
	binary.Read(bytes.NewReader(raw), binary.LittleEndian, values)
	return strings.Trim(fmt.Sprint(values), "[]")
}

func connect(address, rootCert string) (*grpc.ClientConn, error) {
	if rootCert == "" {
		return grpc.Dial(address, grpc.WithInsecure())
	}
	roots, err := credentials.NewClientTLSFromFile(rootCert, "")
	if err != nil {
		return nil, err
	}
	return grpc.Dial(address, grpc.WithTransportCredentials(roots))
}

func run(address, rootCert string, command func(context.Context, client) error) error {
	connection, err := connect(address, rootCert)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return command(ctx, inference.NewGRPCInferenceServiceClient(connection))
}

func exitWithUsage() {
	fmt.Fprintln(os.Stderr, usage)
	os.Exit(2)
}

func main() {
	flag.Usage = exitWithUsage
	address := flag.String("address", "localhost:8001", "")
	rootCert := flag.String("root-cert", "", "")
	flag.Parse()

	commands := map[string]func(context.Context, client) error{
		"unary": unary, "stream": stream, "shared-memory": sharedMemory,
	}
	if flag.NArg() == 2 {
		commands = map[string]func(context.Context, client) error{
			"load":   func(ctx context.Context, conch client) error { return load(ctx, conch, flag.Arg(1)) },
			"unload": func(ctx context.Context, conch client) error { return unload(ctx, conch, flag.Arg(1)) },
		}
	}
	command := commands[flag.Arg(0)]
	if command == nil || flag.NArg() > 2 {
		exitWithUsage()
	}
	if err := run(*address, *rootCert, command); err != nil {
		fmt.Fprintln(os.Stderr, "error:", status.Convert(err).Message())
		os.Exit(1)
	}
}
